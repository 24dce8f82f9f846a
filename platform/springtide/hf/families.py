"""Tables of the dense model families of transformers that springtide's decoder can compute: names of tensors and of config
keys. Pure: no files are read.

A family lists the fields of ``ModelConfig`` that its architecture fixes (``fixed``). It maps transformers' config keys to our
fields, and transformers' tensors to ours. Import and export read the same tables. "Their" means transformers', "our"
springtide's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from springtide.config.engine import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"
"""transformers' names of layers with a window (local layers) and without (global layers)."""

KEYS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "dim",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_dim",
    "max_position_embeddings": "max_sequence_length",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_head",
}
"""Key of transformers' config.json -> field of ModelConfig, in every family."""
GEMMA_KEYS = {
    "attn_logit_softcapping": "attention_cap",
    "final_logit_softcapping": "logit_cap",
    "query_pre_attn_scalar": "score_width",
}

_HEAD = {"lm_head.weight": "head.weight"}
_OUTER = {"model.embed_tokens.weight": "embedding.weight", "model.norm.weight": "norm.weight"}
_PRE_NORMS = {"input_layernorm.weight": "attention_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight"}
_POST_NORMS = {
    "post_attention_layernorm.weight": "attention_out_norm.weight",
    "post_feedforward_layernorm.weight": "ffn_out_norm.weight",
}
_BOTH_NORMS = {
    **_POST_NORMS,
    "input_layernorm.weight": "attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
}
_ATTENTION = {
    "self_attn.q_proj.weight": "attention.query.weight",
    "self_attn.k_proj.weight": "attention.key.weight",
    "self_attn.v_proj.weight": "attention.value.weight",
    "self_attn.o_proj.weight": "attention.out.weight",
}
_QKV_BIASES = {
    "self_attn.q_proj.bias": "attention.query.bias",
    "self_attn.k_proj.bias": "attention.key.bias",
    "self_attn.v_proj.bias": "attention.value.bias",
}
_QK_NORMS = {
    "self_attn.q_norm.weight": "attention.query_norm.weight",
    "self_attn.k_norm.weight": "attention.key_norm.weight",
}
_FFN = {
    "mlp.gate_proj.weight": "ffn.gate.weight",
    "mlp.up_proj.weight": "ffn.up.weight",
    "mlp.down_proj.weight": "ffn.down.weight",
}
_FUSED: dict[str, str | tuple[str, ...]] = {
    "self_attn.qkv_proj.weight": ("attention.query.weight", "attention.key.weight", "attention.value.weight"),
    "self_attn.o_proj.weight": "attention.out.weight",
    "mlp.gate_up_proj.weight": ("ffn.gate.weight", "ffn.up.weight"),
    "mlp.down_proj.weight": "ffn.down.weight",
}


class Match(NamedTuple):
    """A tensor of transformers, and the tensors of springtide's decoder that are joined along their rows to make it."""

    theirs: str
    ours: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of transformers."""

    architecture: str
    """Name of the architecture, as in ``architectures`` of a config.json."""
    model_type: str
    layer_names: Mapping[str, str | tuple[str, ...]]
    """Names of a layer's tensors: transformers' name -> springtide's name. If transformers joins several of springtide's
    tensors along their rows, its name maps to the names of all of them."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ModelConfig with a fixed value in all models of the family. Fields of FIXED_FIELDS that are not listed here
    have Llama 2's values."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Key of transformers' config -> default value if a config.json omits the key. None: the field of ModelConfig is not
    set."""
    more_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further keys of this family, in addition to KEYS: key of config.json -> field of ModelConfig."""
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Key of transformers' config -> its supported values. Only with these values does springtide's decoder compute the same as
    transformers."""
    activation_key: str = "hidden_act"
    activations: tuple[str, ...] = ("silu",)
    """All names that a config.json may use for the family's activation. Exports write the first name."""
    windows: str = "none"
    """Rule for the layers that have a window. ``none``: no layer. ``all``: every layer, if the config sets a window. ``mixed``:
    the layers listed in layer_types; without layer_types, all but every n-th layer (n: sliding_window_pattern or
    ``global_every``). ``qwen``: if use_sliding_window is true, the layers listed in layer_types or those from max_window_layers
    on; else no layer."""
    global_every: int = 0
    """For ``mixed`` windows: one layer in this many is global (has no window), unless config.json contains another number."""
    rope_by_layer_type: bool = False
    """True if local layers (with a window) have other rotary parameters than global layers."""
    scalings: tuple[str, ...] = ("none", "linear", "llama3", "yarn")
    """Values of model.rope_scaling that the family supports."""
    partial_rotary: bool = False
    """True if a model may rotate only the first features of each head (partial_rotary_factor below 1)."""
    theta: float = 10_000.0
    """Value of rope_theta (rotary base) if a config.json omits it."""
    local_theta: float = 0.0
    """Rotary base of local layers (with a window) if a config.json omits rope_local_base_freq; 0: the base of global layers."""

    @property
    def keys(self) -> dict[str, str]:
        """Key of transformers' config.json -> field of ModelConfig, for this family."""
        return {**KEYS, **self.more_keys}

    def tensors(self, config: ModelConfig) -> Iterator[Match]:
        """Yield all tensors of a model of this family, in the order of a forward pass."""
        for theirs, one in _OUTER.items():
            if theirs != "model.norm.weight":
                yield Match(theirs, (one,))
        for layer in range(config.num_layers):
            for theirs, found in self.layer_names.items():
                ours = (found,) if isinstance(found, str) else found
                yield Match(f"model.layers.{layer}.{theirs}", tuple(f"blocks.{layer}.{name}" for name in ours))
        yield Match("model.norm.weight", (_OUTER["model.norm.weight"],))
        for theirs, one in () if config.tied_head else _HEAD.items():
            yield Match(theirs, (one,))


_LLAMA = {**_PRE_NORMS, **_ATTENTION, **_FFN}
_TANH = ("gelu_pytorch_tanh",)
_GEMMA_FIXED = {"activation": "gelu", "norm_unit_offset": True, "scaled_embedding": True}
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_QWEN_DEFAULTS = {"rms_norm_eps": 1e-6}
_GEMMA2_DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}
_GEMMA3_DEFAULTS = {"final_logit_softcapping": None, "query_pre_attn_scalar": 256}
_OLMO_FIXED = {"norms": "post", "qk_norm": "all_heads"}

FAMILIES: dict[str, Family] = {
    one.architecture: one
    for one in (
        Family("LlamaForCausalLM", "llama", _LLAMA, defaults={"rms_norm_eps": 1e-6}),
        Family(
            "Qwen2ForCausalLM",
            "qwen2",
            {**_LLAMA, **_QKV_BIASES},
            fixed={"qkv_bias": True},
            defaults=_QWEN_DEFAULTS,
            windows="qwen",
        ),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            {**_LLAMA, **_QK_NORMS},
            fixed={"qk_norm": "head"},
            defaults={**_QWEN_DEFAULTS, "head_dim": 128},
            windows="qwen",
        ),
        Family("MistralForCausalLM", "mistral", _LLAMA, defaults={"rms_norm_eps": 1e-6}, windows="all"),
        Family(
            "Phi3ForCausalLM",
            "phi3",
            {**_PRE_NORMS, **_FUSED},
            defaults={"rms_norm_eps": 1e-5},
            windows="all",
            scalings=("none", "longrope"),
            partial_rotary=True,
        ),
        Family(
            "GemmaForCausalLM",
            "gemma",
            _LLAMA,
            fixed=_GEMMA_FIXED,
            defaults={**_GEMMA_DEFAULTS, "rms_norm_eps": 1e-6},
            activations=(*_TANH, "gelu"),  # early releases name the activation gelu, but compute its tanh approximation
        ),
        Family(
            "Gemma2ForCausalLM",
            "gemma2",
            {**_BOTH_NORMS, **_ATTENTION, **_FFN},
            fixed={**_GEMMA_FIXED, "norms": "both"},
            defaults={**_GEMMA_DEFAULTS, **_GEMMA2_DEFAULTS, "rms_norm_eps": 1e-6},
            more_keys=GEMMA_KEYS,
            activation_key="hidden_activation",
            activations=_TANH,
            windows="mixed",
            global_every=2,
        ),
        Family(
            "Gemma3ForCausalLM",
            "gemma3_text",
            {**_BOTH_NORMS, **_ATTENTION, **_QK_NORMS, **_FFN},
            fixed={**_GEMMA_FIXED, "norms": "both", "qk_norm": "head"},
            defaults={**_GEMMA_DEFAULTS, **_GEMMA3_DEFAULTS, "rms_norm_eps": 1e-6},
            more_keys={key: field for key, field in GEMMA_KEYS.items() if key != "attn_logit_softcapping"},
            # transformers' Gemma 3 ignores this key, so only null is supported
            only={"attn_logit_softcapping": (None,)},
            activation_key="hidden_activation",
            activations=_TANH,
            windows="mixed",
            global_every=6,
            rope_by_layer_type=True,
            theta=1_000_000.0,
            local_theta=10_000.0,
        ),
        Family(
            "Olmo2ForCausalLM",
            "olmo2",
            {**_POST_NORMS, **_ATTENTION, **_QK_NORMS, **_FFN},
            fixed=_OLMO_FIXED,
            defaults={"rms_norm_eps": 1e-5},
        ),
        Family(
            "Olmo3ForCausalLM",
            "olmo3",
            {**_POST_NORMS, **_ATTENTION, **_QK_NORMS, **_FFN},
            fixed=_OLMO_FIXED,
            defaults={"rms_norm_eps": 1e-5},
            windows="mixed",
            global_every=4,
            rope_by_layer_type=True,
            theta=500_000.0,
        ),
    )
}
"""Architecture -> family. If several families compute the same as the exported model, an export uses the first."""

FIXED_FIELDS = {
    "activation": "silu",
    "qkv_bias": False,
    "qk_norm": "none",
    "norms": "pre",
    "norm_unit_offset": False,
    "scaled_embedding": False,
}
"""Fields of ModelConfig that a family may fix -> values in Llama 2."""
