"""The decoder as each of the open families, against their implementation in transformers."""

from __future__ import annotations

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
        {"qk_norm": True, "head_dim": 32, "norm_eps": 1e-6, "rope_theta": 1e6, "tied_head": False},
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


def both(family: str) -> tuple[Decoder, Any]:
    """Ours and theirs with the same weights, none of which is zero or one."""
    kind, mine, theirs = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**THEIRS, **theirs})
    their_model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in their_model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model = build(ModelConfig(**{**SHAPE, **mine}), VOCABULARY)
    weights = {}
    for name, tensor in their_model.state_dict().items():
        parts = [NAMES.get(part, part) for part in name.removeprefix("model.").split(".")]
        weights[".".join(parts)] = tensor
    model.load_state_dict(weights)  # strict: nothing is left over on either side
    return model, their_model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(family: str) -> None:
    model, theirs = both(family)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    mine, expected = model(tokens), theirs(tokens).logits
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0.0)
    mine.square().mean().backward()
    expected.square().mean().backward()
    torch.testing.assert_close(
        model.embedding.weight.grad, theirs.get_input_embeddings().weight.grad, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("recipe", "vocabulary", "billions"),
    [
        ("llama3_8b", 128256, 8.030),
        ("llama3_70b", 128256, 70.554),
        ("qwen3_4b", 151936, 4.022),
        ("gemma_2b", 256000, 2.506),
    ],
)
def test_recipes_have_the_size_their_name_says(recipe: str, vocabulary: int, billions: float) -> None:
    model = skeleton(configs.recipes.RECIPES[recipe]().model, vocabulary)  # no memory for it
    assert num_parameters(model) / 1e9 == pytest.approx(billions, abs=5e-4)
