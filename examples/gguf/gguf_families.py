"""The architectures of llama.cpp that a family of transformers goes out as: metadata and limits, as data.

Each was read back, with these limits, by llama.cpp itself (build 11549), whose logits were ours; what a limit excludes would
load there and compute something else, so it is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError, explain
from springtide.hf.families import Family

ROPE_FACTORS = "rope_freqs.weight"
"""What wavelengths are multiplied by, where Llama 3's scaling is a tensor."""
_REMEDY = "serve the export by transformers or vLLM"

Value = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[str]
"""A value of the metadata."""


@dataclasses.dataclass(frozen=True)
class GgufFamily:
    """One architecture of llama.cpp."""

    name: str
    """As in general.architecture."""
    pairs: bool = False
    """Whether neighbours are rotated together, so that rows of queries and keys change places."""
    equal_heads: bool = False
    """Whether heads are as wide as dim / num_heads."""
    head: str = "any"
    """Output head: ``any``, ``tied`` to the embedding, or ``own``, which is a copy of it if ours is tied."""
    scalings: tuple[str, ...] = ("none", "linear", "yarn")
    """Values of model.rope_scaling."""
    global_every: int = 0
    """Period of its global layers, where the file has none; 0: it has no local layers."""
    caps: bool = False
    """Whether it always caps scores and logits."""
    local_theta: bool = False
    """Whether local layers have a rotary base of their own."""
    wide_layers: int = 0
    """Number of layers of the one model whose scores are divided by the root of dim / num_heads, not of the width of a head."""


_LLAMA = GgufFamily("llama", pairs=True, scalings=("none", "linear", "llama3", "yarn"))
GGUF_FAMILIES: dict[str, GgufFamily] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": GgufFamily("qwen2", equal_heads=True),
    "Qwen3ForCausalLM": GgufFamily("qwen3"),
    "Phi3ForCausalLM": GgufFamily("phi3", equal_heads=True, scalings=("none",)),
    "GemmaForCausalLM": GgufFamily("gemma", head="tied"),
    "Gemma2ForCausalLM": GgufFamily(
        "gemma2", head="tied", scalings=("none",), global_every=2, caps=True, wide_layers=46
    ),
    "Gemma3ForCausalLM": GgufFamily(
        "gemma3", scalings=("none", "linear"), global_every=6, local_theta=True, wide_layers=62
    ),
    "Olmo2ForCausalLM": GgufFamily("olmo2", equal_heads=True, head="own"),
    "Olmo3ForCausalLM": GgufFamily("olmo2", equal_heads=True, head="own", global_every=4),
}
"""Architecture of transformers -> that of llama.cpp."""


def gguf_family(family: Family, model: ModelConfig) -> GgufFamily:
    """Return the architecture of llama.cpp that computes ``model`` of ``family``. Raises ConfigError with the setting that it
    does not have."""
    found = GGUF_FAMILIES[family.architecture]
    width = model.head_width
    usual = model.dim // model.num_heads if model.num_layers == found.wide_layers else width
    shortest = min((one for one in map(model.window_of, range(model.num_layers)) if one), default=0)
    problems = [
        (found.equal_heads and width * model.num_heads != model.dim, "head_dim", "has heads of dim / num_heads"),
        (found.head == "tied" and not model.tied_head, "tied_head", "has no head of its own"),
        (model.rope_scaling not in found.scalings, "rope_scaling", f"has {', '.join(found.scalings)}"),
        (
            model.rope_scaling == "yarn"
            and bool(model.rope_attention_factor)
            and not math.isclose(model.rope_attention_factor, yarn_factor(model)),
            "rope_attention_factor",
            f"multiplies by {yarn_factor(model):g} unless a file has an attn_factor, which is not written here",
        ),
        (
            not found.global_every and 0 < shortest < model.max_sequence_length,
            "window",
            "has no local layers",
        ),
        (found.caps and not model.attention_cap, "attention_cap", "always caps scores"),
        (found.caps and not model.logit_cap, "logit_cap", "always caps logits"),
        (not found.caps and bool(model.attention_cap), "attention_cap", "caps no scores"),
        ((model.score_width or width) != usual, "score_width", f"always has {usual}"),
        (
            bool(shortest and model.local_rope_theta not in (0.0, model.rope_theta)) and not found.local_theta,
            "local_rope_theta",
            "has one base for all layers",
        ),
    ]
    for fails, field, told in problems:
        if fails:
            problem = f"is not what llama.cpp computes: {found.name} {told}"
            raise ConfigError(explain(f"model.{field}", getattr(model, field), problem, _REMEDY))
    return found


def yarn_factor(model: ModelConfig) -> float:
    """Return what llama.cpp multiplies queries and keys by in a model with yarn (``rope_yarn`` in ggml)."""
    return 0.1 * math.log(model.rope_factor) + 1.0


def rope_factors(model: ModelConfig) -> list[float]:
    """Return what each wavelength is multiplied by in Llama 3's scaling (source: its ``model.py``); empty for others."""
    if model.rope_scaling != "llama3":
        return []
    found = []
    for pair in range(0, model.rotary_width, 2):
        turns = model.rope_original_length / (2 * math.pi * model.rope_theta ** (pair / model.rotary_width))
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1.0 / ((1.0 - kept) / model.rope_factor + kept))
    return found


def gguf_metadata(gguf: GgufFamily, model: ModelConfig) -> dict[str, Value]:
    """Return what llama.cpp reads of a model's shape."""
    width = model.head_width
    found: dict[str, Value] = {
        "vocab_size": model.vocab_size,
        "context_length": model.max_sequence_length,
        "embedding_length": model.dim,
        "block_count": model.num_layers,
        "feed_forward_length": model.ffn_dim,
        "attention.head_count": model.num_heads,
        "attention.head_count_kv": model.num_kv_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(model.norm_eps),
        "rope.dimension_count": model.rotary_width,
        "rope.freq_base": float(model.rope_theta),
    }
    if model.rope_scaling in ("linear", "yarn"):
        found |= {"rope.scaling.type": model.rope_scaling, "rope.scaling.factor": float(model.rope_factor)}
    if model.rope_scaling == "yarn":
        found["rope.scaling.original_context_length"] = model.rope_original_length
    if gguf.caps:
        found["attn_logit_softcapping"] = float(model.attention_cap)
    if model.logit_cap:
        found["final_logit_softcapping"] = float(model.logit_cap)
    local = [bool(model.window_of(layer)) for layer in range(model.num_layers)]
    if gguf.global_every and any(local):
        found |= {"attention.sliding_window": model.window, "attention.sliding_window_pattern": local}
    elif gguf.caps:
        found["attention.sliding_window"] = model.max_sequence_length  # it is never without
    elif gguf.name == "phi3":
        found["attention.sliding_window"] = 0
    if gguf.local_theta and any(local):
        found["rope.freq_base_swa"] = float(model.local_rope_theta or model.rope_theta)
    return {f"{gguf.name}.{key}": value for key, value in found.items()}
