"""The open families, as the decoder and as transformers have them, small enough for tests."""

from __future__ import annotations

import math
from typing import Any

import torch

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
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SHORT, LONG = tuple(1.0 + 0.05 * one for one in range(8)), tuple(1.5 + 0.5 * one for one in range(8))
LONGROPE = {"rope_type": "longrope", "short_factor": [*SHORT], "long_factor": [*LONG]}
LONGROPE |= {"original_max_position_embeddings": 16}
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
    "phi35": (
        "Phi3",
        {
            **SHAPE,
            "tied_head": False,
            "rope_scaling": "longrope",
            "rope_original_length": 16,
            "rope_short_factors": SHORT,
            "rope_long_factors": LONG,
            "rope_attention_factor": math.sqrt(1 + math.log(64 / 16) / math.log(16)),
        },
        {"original_max_position_embeddings": 16, "rope_parameters": {"rope_theta": 1e4, **LONGROPE}},
    ),
    "sharpened": (
        "Llama",
        {
            "rope_scaling": "yarn",
            "rope_factor": 4.0,
            "rope_original_length": 16,
            "tied_head": False,
            "rope_attention_factor": (0.1 * 0.7 * math.log(4.0) + 1.0) / (0.1 * 0.5 * math.log(4.0) + 1.0),
        },
        {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.5, **YARN}},
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
"""Family -> name in transformers, settings of ours, settings of theirs."""


def their_model(family: str, vocab_size: int = VOCABULARY) -> Any:
    """Theirs, with random weights none of which is zero or one."""
    import transformers

    kind, _, theirs = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**THEIRS, **theirs, "vocab_size": vocab_size})
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
