"""The decoder as each of the open families, against their implementation in transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from springtide import config as configs
from springtide.config.engine import ModelConfig
from springtide.model import Decoder, build, num_parameters, skeleton

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 128, 48
SHAPE = {"num_layers": 3, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 96, "max_sequence_length": 64}
THEIRS = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": None,  # or its embedding has no gradient
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
GEMMA = {
    "activation": "gelu",
    "norm_unit_offset": True,
    "scaled_embedding": True,
    "head_dim": 32,
    "norm_eps": 1e-6,
    "norms": "both",
}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama2": (
        "Llama",
        {"tied_head": False},
        {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "llama3": (
        "Llama",
        {"rope_theta": 5e5, "rope_scaling": "llama3", "rope_original_length": 16},
        {
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
    ),
    "linear": (
        "Llama",
        {"rope_scaling": "linear", "rope_factor": 4.0, "num_kv_heads": 1},
        {
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "yarn": (
        "Llama",
        {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 16, "tied_head": False},
        {
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "qwen2": (
        "Qwen2",
        {"qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1e6},
        {
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3": (
        "Qwen3",
        {"qk_norm": "head", "head_dim": 32, "norm_eps": 1e-6, "rope_theta": 1e6, "tied_head": False},
        {"rms_norm_eps": 1e-6, "head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "gemma": (
        "Gemma",
        {
            "activation": "gelu",
            "norm_unit_offset": True,
            "scaled_embedding": True,
            "head_dim": 32,
            "norm_eps": 1e-6,
            "num_kv_heads": 1,
        },
        {
            "rms_norm_eps": 1e-6,
            "head_dim": 32,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "mistral": (
        "Mistral",
        {"tied_head": False, "window": 12},
        {"rms_norm_eps": 1e-5, "sliding_window": 12, "rope_parameters": DEFAULT},
    ),
    "phi3": ("Phi3", {"tied_head": False, "window": 12}, {"sliding_window": 12, "rope_parameters": {**DEFAULT}}),
    "phi4_mini": (
        "Phi3",
        {"rotary_fraction": 0.75},
        {"tie_word_embeddings": True, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.75}},
    ),
    "olmo2": (
        "Olmo2",
        {"norms": "post", "qk_norm": "all_heads", "norm_eps": 1e-6, "rope_theta": 5e5, "tied_head": False},
        {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "olmo3": (
        "Olmo3",
        {
            "norms": "post",
            "qk_norm": "all_heads",
            "norm_eps": 1e-6,
            "rope_theta": 5e5,
            "tied_head": False,
            "window": 12,
            "global_every": 3,
            "rope_scaling": "yarn",
            "rope_factor": 4.0,
            "rope_original_length": 16,
        },
        {
            "rms_norm_eps": 1e-6,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            **GEMMA,
            "window": 12,
            "global_every": 2,
            "attention_cap": 0.5,
            "logit_cap": 3.0,
            "score_width": 48,
        },
        {
            "rms_norm_eps": 1e-6,
            "head_dim": 32,
            "rope_parameters": DEFAULT,
            "sliding_window": 12,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 48,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA,
            "window": 12,
            "global_every": 3,
            "qk_norm": "head",
            "rope_theta": 1e6,
            "local_rope_theta": 1e4,
            "rope_scaling": "linear",
            "rope_factor": 8.0,
        },
        {
            "rms_norm_eps": 1e-6,
            "head_dim": 32,
            "sliding_window": 12,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
}
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
    kind, mine, theirs = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**THEIRS, **theirs})
    their_model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in their_model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model = build(ModelConfig(**{**SHAPE, **mine}), VOCABULARY)
    model.load_state_dict(ours(their_model.state_dict().items(), mine))  # strict: nothing is left over on either side
    return model, their_model


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
