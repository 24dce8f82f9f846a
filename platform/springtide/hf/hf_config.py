"""The config.json of transformers, read as our ``ModelConfig`` and written from it. Pure.

What a config.json says and the decoder does not do is refused by key, value and remedy; so is a key that is not known here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError, explain
from springtide.hf.families import FAMILIES, FIXED_FIELDS, FULL, SLIDING, Family
from springtide.hf.rope import read_rope, written_rope

FILE = "config.json"
_MOST_LAYERS = 4096
_MOST = 2**24
"""Largest width, vocabulary or length [1]."""
_HARMLESS = frozenset(
    {
        *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache", "cache_implementation"),
        *("_attn_implementation_autoset", "attn_implementation", "output_attentions", "output_hidden_states"),
        *("return_dict", "torchscript", "task_specific_params", "id2label", "label2id", "pretraining_tp"),
        *("unsloth_version", "unsloth_fixed", "original_max_position_embeddings"),
        *("is_llama_config", "transformers.js_config", "use_bfloat16", "tf_legacy_loss", "tokenizer_class"),
        *("finetuning_task", "problem_type", "prefix", "sep_token_id", "decoder_start_token_id", "output_scores"),
        *("return_dict_in_generate", "max_length", "min_length", "do_sample", "early_stopping", "num_beams"),
        *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
        *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    }
)
"""Keys that change nothing in what the model computes; code that ``auto_map`` names is never run. transformers 4 wrote defaults
of generation into this file, too."""
_READ_ELSEWHERE = frozenset(
    {
        *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        *("sliding_window_pattern", "_sliding_window_pattern", "hidden_act", "hidden_activation"),
        *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
    }
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "resid_pdrop": (0, None),
    "embd_pdrop": (0, None),
    "use_bidirectional_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_decoder": (False, True, None),
    "chunk_size_feed_forward": (0, None),
    "clip_qkv": (None,),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False, None),
    "cross_attention_hidden_size": (None,),
    "lm_head_bias": (False, None),
    "full_attn_mod": (1, None),
    "interpolate_factor": (1, None),
}
"""Key -> the values that the decoder computes."""
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_REMEDIES = {
    "quantization_config": "import the model before it was quantised, or dequantise it and save it again",
    "attention_dropout": "set it to 0.0 in the file: the decoder trains without dropout",
}
_OTHER = "import a model without it: this decoder does not compute it"


def family_of(config: Any, where: str = FILE) -> Family:
    """Return the family of a config.json. Raises ConfigError with the known ones, and the nearest."""
    known = ", ".join(FAMILIES)
    if not isinstance(config, dict):
        raise ConfigError(explain(where, config, "is not a JSON object", "give the config.json of a model"))
    names = config.get("architectures")
    if names is None:  # a config alone, as PreTrainedConfig.save_pretrained writes it
        names = [one.architecture for one in FAMILIES.values() if one.model_type == config.get("model_type")]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        problem = "does not name one architecture"
        raise ConfigError(explain(f"{where}: architectures", config.get("architectures"), problem, f"known: {known}"))
    if names[0] not in FAMILIES:
        close = difflib.get_close_matches(names[0], FAMILIES, n=1, cutoff=0.4)
        remedy = f"known are {known}" + (f"; the nearest is {close[0]}" if close else "")
        raise ConfigError(explain(f"{where}: architectures", names[0], "is not known here", remedy))
    family = FAMILIES[names[0]]
    if (kind := config.get("model_type")) not in (None, family.model_type):
        problem = f"is not {family.model_type}, the type of {names[0]}, and transformers goes by it"
        raise ConfigError(explain(f"{where}: model_type", kind, problem, "correct the one that is wrong"))
    return family


def read_config(config: Any, where: str = FILE) -> tuple[Family, ModelConfig]:
    """Return the family and the model of a config.json, whose bytes nobody has checked.

    Raises:
        ConfigError: the key, its value, and what the decoder does not do, or what is not a value.
    """
    family = family_of(config, where)
    for key, value in config.items():
        _check_key(family, key, value, where)
    fields: dict[str, Any] = dict(family.fixed)
    for key, field in family.keys.items():
        value = config.get(key)
        usual = None if key in _CAPS and key in config else family.defaults.get(key)  # null means without
        fields[field] = usual if value is None else _number(key, value, where)
    needed = [key for key, field in family.keys.items() if fields[field] is None and key in _NEEDED]
    if needed:
        problem = "is missing"
        raise ConfigError(explain(f"{where}: {needed[0]}", None, problem, "give the config.json of a whole model"))
    _fill_in(fields)
    fields |= _windows(family, config, fields, where)
    fields |= read_rope(family, config, fields, where)
    try:
        return family, ModelConfig(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        named = ".".join(map(str, first["loc"]))
        theirs = next((key for key, field in family.keys.items() if field == named), named)
        said = explain(f"{where}: {theirs}", config.get(theirs), first["msg"], "import a model of another shape")
        raise ConfigError(said) from None


_NEEDED = {
    *("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "rms_norm_eps"),
}


def _fill_in(fields: dict[str, Any]) -> None:
    """Replace what a config.json may be silent about by what it means, and put it as our configs do."""
    fields["num_kv_heads"] = fields["num_kv_heads"] or fields["num_heads"]
    fields["tied_head"] = bool(fields["tied_head"])
    width = fields["dim"] // fields["num_heads"]
    usual = fields["dim"] % (2 * fields["num_heads"]) == 0
    if not fields["head_dim"]:
        fields["head_dim"] = width
    if fields["head_dim"] == width and usual:
        fields["head_dim"] = 0
    for cap in ("attention_cap", "logit_cap"):
        fields[cap] = fields.get(cap) or 0.0
    scale = fields.get("score_width") or 0
    fields["score_width"] = 0 if scale == (fields["head_dim"] or width) else scale


def _check_key(family: Family, key: str, value: Any, where: str) -> None:
    """Raise ConfigError for a key whose value the decoder does not compute."""
    named = f"{where}: {key}"
    if key in ("hidden_act", "hidden_activation"):
        if value not in (None, *family.activations):
            raise ConfigError(explain(named, value, f"{family.architecture} has {family.activations[0]} here", _OTHER))
    elif (only := family.only.get(key, _ONLY.get(key))) is not None:
        if not any(value == one and isinstance(value, bool) <= isinstance(one, bool) for one in only):
            raise ConfigError(explain(named, value, "is not computed here", _REMEDIES.get(key, _OTHER)))
    elif key not in _HARMLESS | _READ_ELSEWHERE and key not in family.keys and value is not None:
        remedy = "remove the key from the file if it changes nothing in what the model computes"
        raise ConfigError(explain(named, value, f"is a key that is not known for {family.architecture}", remedy))


def _number(key: str, value: Any, where: str) -> Any:
    """Return a flag as it is, a count as int, another number as float, each within its limits."""
    named = f"{where}: {key}"
    if key == "tie_word_embeddings":
        if not isinstance(value, bool):
            raise ConfigError(explain(named, value, "is not true or false", "correct the file"))
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:  # nor is NaN
        raise ConfigError(explain(named, value, "is not a number", "correct the file"))
    if key == "rms_norm_eps" or key in _CAPS:
        if not 0 < value < _MOST:
            raise ConfigError(explain(named, value, f"must be above 0 and below {_MOST}", "correct the file"))
        return float(value)
    most = _MOST_LAYERS if key == "num_hidden_layers" else _MOST
    if value != int(value) or not 1 <= value <= most:
        raise ConfigError(explain(named, value, f"must be a whole number from 1 to {most}", "correct the file"))
    return int(value)


def _windows(family: Family, config: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return window and global_every."""
    window = config.get("sliding_window")
    if family.windows == "none":
        if window is not None or config.get("use_sliding_window"):
            said = explain(f"{where}: sliding_window", window, f"{family.architecture} has no local layers", _OTHER)
            raise ConfigError(said)
        return {}
    if family.windows == "qwen" and not config.get("use_sliding_window", False):
        window = None
    types = _layer_types(family, config, fields["num_layers"], window, where)
    if SLIDING not in types:
        return {}
    window = _number("sliding_window", window, where)
    if FULL not in types:
        # tables of the local layers' own need a global one, if only in name
        return {"window": window, "global_every": len(types) + 1 if family.rope_by_layer_type else 0}
    every = types.index(FULL) + 1
    expected = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(len(types))]
    if types != expected:
        problem = f"is not a repeated pattern with every {every}th layer global"
        raise ConfigError(explain(f"{where}: layer_types", types, problem, _OTHER))
    return {"window": window, "global_every": every}


def _layer_types(family: Family, config: Mapping[str, Any], layers: int, window: Any, where: str) -> list[str]:
    types = config.get("layer_types")
    if types is not None and family.windows != "all":
        if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= {SLIDING, FULL}:
            problem = f"is not a list of {layers} times {SLIDING} or {FULL}"
            raise ConfigError(explain(f"{where}: layer_types", types, problem, _OTHER))
        if SLIDING in types and window is None:
            problem = "is missing, and layer_types has local layers"
            raise ConfigError(explain(f"{where}: sliding_window", None, problem, "correct the file"))
        return [str(one) for one in types]
    if types is not None:
        raise ConfigError(explain(f"{where}: layer_types", types, f"is not of {family.architecture}", _OTHER))
    if window is None and family.windows != "mixed":
        return [FULL] * layers
    if family.windows == "all":
        return [SLIDING] * layers
    if family.windows == "qwen":
        first = config.get("max_window_layers", 28)
        return [SLIDING if isinstance(first, int) and layer >= first else FULL for layer in range(layers)]
    every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern")) or family.global_every
    every = _number("sliding_window_pattern", every, where)
    if window is None:
        problem = f"is missing, and {family.architecture} has local layers"
        raise ConfigError(explain(f"{where}: sliding_window", None, problem, "correct the file"))
    return [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]


def choose_family(model: ModelConfig) -> Family:
    """Return the family of transformers that computes what ``model`` does. Raises ConfigError with what the nearest one does
    not have."""
    problems = {name: misfits(family, model) for name, family in FAMILIES.items()}
    fitting = [name for name, found in problems.items() if not found]
    if fitting:
        return FAMILIES[fitting[0]]
    nearest = min(problems, key=lambda name: len(problems[name]))
    field = problems[nearest][0].partition(" ")[0]
    value = getattr(model, field.removeprefix("model."), None)
    told = f"no architecture of transformers has it; the nearest, {nearest}, differs in {'; '.join(problems[nearest])}"
    raise ConfigError(explain(field, value, told, "read the checkpoint's own safetensors files"))


def misfits(family: Family, model: ModelConfig) -> list[str]:
    """Return what ``family`` does not compute of ``model``, each as field and reason; empty if it computes the same."""
    if model.source:
        return [f"model.source names a model of your own: {model.source}"]
    found = []
    for field, usual in FIXED_FIELDS.items():
        wanted, here = family.fixed.get(field, usual), getattr(model, field)
        if here != wanted:
            found.append(f"model.{field} = {here}, which is {wanted} there")
    for key in ("attention_cap", "logit_cap", "score_width"):
        if getattr(model, key) and key not in family.more_keys.values():
            found.append(f"model.{key} = {getattr(model, key)}, which it does not have")
    if model.width_multiplier != 1.0:
        found.append(f"model.base_width = {model.base_width}, which scales attention and logits")
    if model.rotary_fraction != 1.0 and not family.partial_rotary:
        found.append(f"model.rotary_fraction = {model.rotary_fraction}, which it does not have")
    if model.rope_scaling not in family.scalings:
        found.append(f"model.rope_scaling = {model.rope_scaling}, which it does not have")
    local = [bool(model.window_of(layer)) for layer in range(model.num_layers)]
    if any(local) and (family.windows == "none" or (family.windows == "all" and not all(local))):
        found.append(f"model.window = {model.window}, which it does not have in these layers")
    apart = any(local) and model.global_every > 0
    scaled = model.rope_scaling != "none" or model.local_rope_theta not in (0, model.rope_theta)
    if apart and scaled and not family.rope_by_layer_type:
        found.append("model.local_rope_theta or rope_scaling differs in local layers, which it does not have")
    if any(local) and not apart and model.rope_scaling != "none" and family.rope_by_layer_type:
        found.append("model.rope_scaling is in local layers too, where it has none")
    return found


def written_config(
    family: Family, model: ModelConfig, vocab_size: int, dtype: str, end_ids: Sequence[int], bos_id: int | None
) -> dict[str, Any]:
    """Return the config.json of ``model`` in ``family``. ``vocab_size``: rows of the embedding; ``dtype``: torch's name of the
    weights' type; ``end_ids``: those that end a text or a turn, none if unknown; ``bos_id``: None if unknown."""
    found: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for key, field in family.keys.items():
        found[key] = getattr(model, field)
    found |= {"vocab_size": vocab_size, "head_dim": model.head_width, family.activation_key: family.activations[0]}
    for key in _CAPS:
        if key in found:
            found[key] = found[key] or None
    if "query_pre_attn_scalar" in found:
        found["query_pre_attn_scalar"] = model.score_width or model.head_width
    local = [bool(model.window_of(layer)) for layer in range(model.num_layers)]
    if family.windows != "none":
        found["sliding_window"] = model.window if any(local) else None
    if family.windows in ("qwen", "mixed"):
        found["layer_types"] = [SLIDING if one else FULL for one in local]
    if family.windows == "mixed":
        found["sliding_window"] = model.window or model.max_sequence_length
    if family.windows == "qwen":
        found |= {"use_sliding_window": any(local), "max_window_layers": 0 if any(local) else model.num_layers}
    found |= written_rope(family, model)
    found |= {"attention_bias": False, "attention_dropout": 0.0, "use_cache": True, "initializer_range": 0.02}
    ends = list(end_ids) if len(end_ids) > 1 else next(iter(end_ids), None)
    found |= {"bos_token_id": bos_id, "eos_token_id": ends, "pad_token_id": None}
    return found | {"dtype": dtype, "torch_dtype": dtype}  # the second for transformers before 5
