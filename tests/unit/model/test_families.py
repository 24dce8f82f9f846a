"""The decoder as each of the open families, against their implementation in transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from families import FAMILIES, LENGTH, SHAPE, VOCABULARY, their_model

from springtide import config as configs
from springtide.config.engine import ModelConfig
from springtide.model import Decoder, build, num_parameters, skeleton

pytest.importorskip("transformers")

NAMES = {
    "embed_tokens": "embedding",
    "layers": "blocks",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "out",
    "q_norm": "query_norm",
    "k_norm": "key_norm",
    "mlp": "ffn",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "lm_head": "head",
}
OUT_NORMS = {
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_out_norm",
}
FUSED = {
    "self_attn.qkv_proj": (("attention.query", 64), ("attention.key", 32), ("attention.value", 32)),
    "mlp.gate_up_proj": (("ffn.gate", 96), ("ffn.up", 96)),
}
"""Theirs -> ours, with their rows."""


def ours(tensors: Iterable[tuple[str, torch.Tensor]], mine: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Their tensors under the names of ours."""
    names = NAMES if mine.get("norms", "pre") == "pre" else NAMES | OUT_NORMS
    found = {}
    for name, tensor in tensors:
        name = name.removeprefix("model.")
        fused = next((one for one in FUSED if one in name), None)
        parts = {name: tensor}
        if fused:
            parts, begin = {}, 0
            for one, rows in FUSED[fused]:
                parts[name.replace(fused, one)] = tensor[begin : begin + rows]
                begin += rows
        found |= {".".join(names.get(part, part) for part in one.split(".")): part for one, part in parts.items()}
    return found


def both(family: str) -> tuple[Decoder, Any]:
    """Ours and theirs with the same weights, none of which is zero or one."""
    mine = FAMILIES[family][1]
    their = their_model(family)
    model = build(ModelConfig(**{**SHAPE, **mine}), VOCABULARY)
    model.load_state_dict(ours(their.state_dict().items(), mine))  # strict: nothing is left over on either side
    return model, their


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(family: str) -> None:
    model, theirs = both(family)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    mine, expected = model(tokens), theirs(tokens).logits
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0.0)
    mine.square().mean().backward()
    expected.square().mean().backward()
    gradients = ours(((name, one.grad) for name, one in theirs.named_parameters()), FAMILIES[family][1])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "phi4_mini"])
def test_the_loss_is_that_of_transformers(family: str) -> None:
    model, theirs = both(family)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1))
    total, nats = model(tokens[:, :-1], tokens[:, 1:])
    expected = theirs(tokens[:, :-1]).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(expected, tokens[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(nats.sum(), expected)
    by_token = model(tokens[:, :-1], tokens[:, 1:], by_token=True)
    torch.testing.assert_close(by_token.sum(), expected.detach())
    (total / tokens.numel()).backward()
    (expected / tokens.numel()).backward()
    gradients = ours(((name, one.grad) for name, one in theirs.named_parameters()), FAMILIES[family][1])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("recipe", "vocabulary", "billions"),
    [
        ("llama3_8b", 128256, 8.030),
        ("llama3_70b", 128256, 70.554),
        ("qwen3_4b", 151936, 4.022),
        ("gemma_2b", 256000, 2.506),
        ("gemma2_2b", 256000, 2.614),
        ("gemma3_1b", 262144, 1.000),
        ("phi4_mini", 200064, 3.836),
        ("mistral_7b", 32000, 7.242),
        ("olmo2_7b", 100352, 7.299),
        ("olmo3_7b", 100352, 7.299),
    ],
)
def test_recipes_have_the_size_their_name_says(recipe: str, vocabulary: int, billions: float) -> None:
    model = skeleton(configs.recipes.RECIPES[recipe]().model, vocabulary)  # no memory for it
    assert num_parameters(model) / 1e9 == pytest.approx(billions, abs=5e-4)
