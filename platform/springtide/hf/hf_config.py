"""Convert the config.json of transformers to springtide's ``ModelConfig``, and back. Pure: no files are read.

A setting that springtide's decoder does not compute raises ConfigError with key, value and remedy. An unknown key raises it,
too.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError, explain
from springtide.hf.families import FAMILIES, FIXED_FIELDS, FULL, SLIDING, Family

FILE = "config.json"
_MOST_LAYERS = 4096
_MOST = 2**24
"""Largest width, vocabulary or length that a config.json may have [1]."""
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
"""Keys that do not change what the model computes. Code that ``auto_map`` names is never run. The keys of text generation are
here because transformers 4 also wrote them into config.json."""
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
"""Key of config.json -> the only values that springtide's decoder computes. Other values are refused."""
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_REMEDIES = {
    "quantization_config": "import the model before it was quantised, or dequantise it and save it again",
    "attention_dropout": "set it to 0.0 in the file: the decoder trains without dropout",
}
_OTHER = "import a model without it: this decoder does not compute it"


def family_of(config: Any, where: str = FILE) -> Family:
    """Return the family of a config.json. Raises ConfigError for an unknown architecture; the message lists the known
    architectures and suggests the nearest."""
    known = ", ".join(FAMILIES)
    if not isinstance(config, dict):
        raise ConfigError(explain(where, config, "is not a JSON object", "give the config.json of a model"))
    names = config.get("architectures")
    # A config that PreTrainedConfig.save_pretrained saved without a model names no architecture: find it by model_type
    if names is None:
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
    """Return the family and our model config of an untrusted config.json.

    Raises:
        ConfigError: a key has a value that is not valid, or that the decoder does not compute.
    """
    family = family_of(config, where)
    for key, value in config.items():
        _check_key(family, key, value, where)
    fields: dict[str, Any] = dict(family.fixed)
    for key, field in family.keys.items():
        value = config.get(key)
        usual = None if key in _CAPS and key in config else family.defaults.get(key)  # a cap that is null means no cap
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
    """Set those ``fields`` of ModelConfig that a config.json may omit, and convert values to the form of ModelConfig."""
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
    """Raise ConfigError if the key is unknown, or springtide's decoder does not compute its value."""
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
    """Return the value of a key: a flag as bool, a count as int, any other number as float. Raises ConfigError if it is outside
    its limits."""
    named = f"{where}: {key}"
    if key == "tie_word_embeddings":
        if not isinstance(value, bool):
            raise ConfigError(explain(named, value, "is not true or false", "correct the file"))
        return value
    # written so that NaN is refused, too
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
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
    """Return the fields ``window`` (tokens) and ``global_every`` of ModelConfig; an empty dict if no layer has a window."""
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
        # All layers are local. If local layers have separate rotary tables, the decoder makes these only with global_every > 0.
        # So set global_every above the number of layers: then no layer becomes global
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
        raise ConfigError(explain(f"{where}: layer_types", types, f"is not a key of {family.architecture}", _OTHER))
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
    """Return the family of transformers that computes the same as ``model``. Raises ConfigError if there is none, with
    the differences from the nearest family."""
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
    """Return the settings of ``model`` that transformers' ``family`` does not compute, each as text with the reason; empty if
    it computes all."""
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
    """Return the config.json for ``model`` as a model of ``family``. ``vocab_size``: rows of the embedding; ``dtype``: torch's
    name of the weights' dtype; ``end_ids``: ids that end a text or a turn, empty if unknown; ``bos_id``: None if unknown."""
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
    return found | {"dtype": dtype, "torch_dtype": dtype}  # transformers 4 reads torch_dtype


# Read and write the rotary parameters of a config.json, as transformers 4 and transformers 5 write them. Pure: no files are
# read.

_LEGACY = {"factor": "rope_factor", "original_max_position_embeddings": "rope_original_length"}
_LLAMA3 = {"low_freq_factor": "rope_low_freq_factor", "high_freq_factor": "rope_high_freq_factor"}
_OF_TYPE: dict[str, dict[str, str]] = {
    "none": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {**_LEGACY, **_LLAMA3},
    "yarn": _LEGACY,
    "longrope": {"original_max_position_embeddings": "rope_original_length"},
}
"""Value of ``model.rope_scaling`` -> its parameters: transformers' name -> field of ModelConfig."""
_YARN_ONLY: dict[str, tuple[Any, ...]] = {
    "beta_fast": (32, None),
    "beta_slow": (1, None),
    "truncate": (True, None),
}
"""Parameter of YaRN scaling -> the only values that springtide's decoder computes."""
_FACTORS = {"short_factor": "rope_short_factors", "long_factor": "rope_long_factors"}
_MOST_FACTORS = 2**12
_LENGTH = "original_max_position_embeddings"
_PHI3_LENGTH = 4096
"""Value of original_max_position_embeddings for a Phi 3 whose config.json omits it."""


def read_rope(family: Family, config: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the rotary fields of ModelConfig. ``fields``: the fields of ModelConfig read so far. Raises ConfigError for a
    setting that springtide's decoder does not compute."""
    theta = _positive(config.get("rope_theta"), f"{where}: rope_theta", family.theta)
    given, named = config.get("rope_parameters"), f"{where}: rope_parameters"
    if config.get("rope_scaling") not in (None, {}):
        _check_same(given, config["rope_scaling"], where)
        given, named = config["rope_scaling"], f"{where}: rope_scaling"
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ConfigError(explain(named, given, "is not a JSON object", "correct the file"))
    if not family.rope_by_layer_type:
        found = _read_one(family, given, theta, config, named)
        if found.get("rope_scaling", "none") != "none" and fields.get("window") and fields.get("global_every"):
            raise ConfigError(
                explain(named, given, "scales local layers too, and the decoder scales only global ones", _OTHER)
            )
        return found
    local_theta = family.local_theta or theta
    if given.keys() & {SLIDING, FULL}:
        if extra := given.keys() - {SLIDING, FULL}:
            raise ConfigError(explain(named, sorted(extra), "names neither local nor global layers", _OTHER))
        both = given
    else:  # the form of transformers 4: its rotary parameters apply to global layers only
        local = _positive(config.get("rope_local_base_freq"), f"{where}: rope_local_base_freq", local_theta)
        both = {FULL: given, SLIDING: {"rope_type": "default", "rope_theta": local}}
    found = _read_one(family, both.get(FULL) or {}, theta, config, f"{named}.{FULL}")
    local_found = _read_one(family, both.get(SLIDING) or {}, local_theta, config, f"{named}.{SLIDING}")
    if not fields.get("window"):
        return found
    if local_found["rope_scaling"] != "none":
        raise ConfigError(explain(f"{named}.{SLIDING}", both[SLIDING], "scales the positions of local layers", _OTHER))
    same = local_found["rope_theta"] == found["rope_theta"]
    return {**found, "local_rope_theta": 0.0 if same else local_found["rope_theta"]}


def _check_same(parameters: Any, scaling: Any, where: str) -> None:
    """Raise ConfigError if rope_parameters (transformers 5) and rope_scaling (transformers 4) differ for the global layers."""
    if not isinstance(parameters, dict) or not isinstance(scaling, dict) or not parameters:
        return  # only one form is given, or one is invalid: other checks refuse an invalid one
    full = parameters.get(FULL)
    forms = full if isinstance(full, dict) else parameters, scaling
    new, old = ({"rope_type": one.get("type", "default"), **one} for one in forms)
    if differ := sorted(key for key in new.keys() & old.keys() if new[key] != old[key] and key != "type"):
        problem = f"has another {', '.join(differ)} than rope_parameters"
        raise ConfigError(explain(f"{where}: rope_scaling", scaling, problem, "remove the one that is wrong"))


def _read_one(family: Family, given: Any, theta: float, config: Mapping[str, Any], named: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(explain(named, given, "is not a JSON object", "correct the file"))
    kind = given.get("rope_type", given.get("type", "default"))
    scaling = kind
    if kind in ("default", None):
        scaling = "none"
    elif kind == "su":  # name of longrope in the first releases of Phi 3
        scaling = "longrope"
    if not isinstance(scaling, str) or scaling not in _OF_TYPE or scaling not in family.scalings:
        there = ", ".join("default" if one == "none" else one for one in family.scalings)
        raise ConfigError(explain(f"{named}: rope_type", kind, f"{family.architecture} has {there} here", _OTHER))
    found: dict[str, Any] = {"rope_scaling": scaling}
    found["rope_theta"] = _positive(given.get("rope_theta"), f"{named}: rope_theta", theta)
    part = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    fraction = _positive(part, f"{named}: partial_rotary_factor", 1.0)
    if fraction != 1.0 and not family.partial_rotary:
        raise ConfigError(explain(f"{named}: partial_rotary_factor", part, "is not computed here", _OTHER))
    found["rotary_fraction"] = fraction
    for key, field in _OF_TYPE[scaling].items():
        value = given.get(key)
        if key == "original_max_position_embeddings":
            outer = config.get(key) or (_PHI3_LENGTH if scaling == "longrope" else None)
            if None not in (value, outer) and value != outer:
                problem = f"differs from the {outer} beside rope_parameters, which transformers takes"
                raise ConfigError(explain(f"{named}: {key}", value, problem, "correct the one that is wrong"))
            if value is None:
                value = config.get("max_position_embeddings") if outer is None else outer
        if value is None:
            raise ConfigError(
                explain(f"{named}: {key}", None, f"is missing, and {scaling} needs it", "correct the file")
            )
        number = _positive(value, f"{named}: {key}", 0.0)
        found[field] = int(number) if field == "rope_original_length" else number
    if scaling == "longrope":
        found |= {field: _factors(given.get(key), f"{named}: {key}") for key, field in _FACTORS.items()}
        if found["rope_original_length"] < 2:
            problem = "must be at least 2"
            raise ConfigError(
                explain(f"{named}: {_LENGTH}", found["rope_original_length"], problem, "correct the file")
            )
        longest = _positive(config.get("max_position_embeddings"), f"{named}: max_position_embeddings", 1.0)
        factor = _positive(given.get("factor"), f"{named}: factor", longest / found["rope_original_length"])
        usual = math.sqrt(1 + math.log(factor) / math.log(found["rope_original_length"])) if factor > 1 else 1.0
        found["rope_attention_factor"] = _positive(given.get("attention_factor"), f"{named}: attention_factor", usual)
    elif scaling == "yarn" and (sharpened := _yarn_attention(given, found["rope_factor"], named)) is not None:
        found["rope_attention_factor"] = sharpened
    _check_rest(scaling, given, found, named)
    return found


def _yarn_attention(given: Mapping[str, Any], factor: float, named: str) -> float | None:
    """Return YaRN's attention factor for ``model.rope_attention_factor``: None if it equals the paper's value, 0.1 ln(factor) +
    1."""
    grown = math.log(max(factor, 1.0))
    usual = told = 0.1 * grown + 1.0
    parts = [_positive(given.get(key) or None, f"{named}: {key}", 0.0) for key in ("mscale", "mscale_all_dim")]
    if all(parts):
        told = (0.1 * parts[0] * grown + 1.0) / (0.1 * parts[1] * grown + 1.0)
    found = _positive(given.get("attention_factor"), f"{named}: attention_factor", told)
    return None if math.isclose(found, usual, rel_tol=1e-6) else found


def _factors(value: Any, named: str) -> tuple[float, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_FACTORS:
        raise ConfigError(explain(named, value, "is not a list of factors", "correct the file"))
    return tuple(_positive(one, f"{named}.{number}", 0.0) for number, one in enumerate(value))


def _check_rest(scaling: str, given: Mapping[str, Any], found: Mapping[str, Any], named: str) -> None:
    """Raise ConfigError for a rotary parameter that this file does not read. If it were ignored, the model's outputs could
    differ from those in transformers."""
    read = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_OF_TYPE[scaling]}
    read |= {"attention_factor", "mscale", "mscale_all_dim"} if scaling == "yarn" else set()
    read |= {"attention_factor", "factor", *_FACTORS} if scaling == "longrope" else set()
    for key, value in given.items():
        if key in read or value is None:
            continue
        if scaling == "yarn" and key in _YARN_ONLY and value in _YARN_ONLY[key]:
            continue
        if scaling in ("none", "linear") and key == "original_max_position_embeddings":
            continue  # transformers ignores this length without scaling and with linear scaling
        raise ConfigError(explain(f"{named}: {key}", value, "is not computed here", _OTHER))


def _positive(value: Any, named: str, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**40:
        raise ConfigError(explain(named, value, "is not a number above 0", "correct the file"))
    return float(value)


def written_rope(family: Family, model: ModelConfig) -> dict[str, Any]:
    """Return the rotary keys of a config.json, in the forms of both transformers 5 and transformers 4."""
    whole: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling != "none":
        whole["rope_type"] = model.rope_scaling
        whole |= {key: getattr(model, field) for key, field in _OF_TYPE[model.rope_scaling].items()}
    if model.rope_scaling == "longrope":
        whole |= {key: list(getattr(model, field)) for key, field in _FACTORS.items()}
    if model.rope_scaling == "longrope" or (model.rope_scaling == "yarn" and model.rope_attention_factor):
        whole["attention_factor"] = model.rope_attention_factor or 1.0
    if family.partial_rotary:
        whole["partial_rotary_factor"] = model.rotary_fraction
    scaled = {key: value for key, value in whole.items() if key not in ("rope_theta", "partial_rotary_factor")}
    found: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_parameters": whole}
    found["rope_scaling"] = scaled if model.rope_scaling != "none" else None
    if model.rope_scaling == "longrope":
        found["original_max_position_embeddings"] = model.rope_original_length
    if family.partial_rotary:
        found["partial_rotary_factor"] = model.rotary_fraction
    if family.rope_by_layer_type:
        theta = model.local_rope_theta if model.global_every and model.local_rope_theta else model.rope_theta
        found["rope_parameters"] = {FULL: whole, SLIDING: {"rope_type": "default", "rope_theta": theta}}
        if family.local_theta:
            found["rope_local_base_freq"] = theta
    return found
