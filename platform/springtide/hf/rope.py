"""Rotary parameters of a config.json, in the forms of transformers 4 and 5, read and written. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError, explain
from springtide.hf.families import FULL, SLIDING, Family

_LEGACY = {"factor": "rope_factor", "original_max_position_embeddings": "rope_original_length"}
_LLAMA3 = {"low_freq_factor": "rope_low_freq_factor", "high_freq_factor": "rope_high_freq_factor"}
_OF_TYPE: dict[str, dict[str, str]] = {
    "none": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {**_LEGACY, **_LLAMA3},
    "yarn": _LEGACY,
    "longrope": {"original_max_position_embeddings": "rope_original_length"},
}
"""Our scaling -> their key -> our field."""
_YARN_ONLY: dict[str, tuple[Any, ...]] = {
    "beta_fast": (32, None),
    "beta_slow": (1, None),
    "truncate": (True, None),
}
"""What YaRN is computed with here."""
_FACTORS = {"short_factor": "rope_short_factors", "long_factor": "rope_long_factors"}
_MOST_FACTORS = 2**12
_LENGTH = "original_max_position_embeddings"
_PHI3_LENGTH = 4096
"""original_max_position_embeddings of a Phi 3 whose config.json does not say it."""
_OTHER = "import a model without it: this decoder does not compute it"


def read_rope(family: Family, config: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the rotary fields of ModelConfig. ``fields``: those that are known so far. Raises ConfigError for what the decoder
    does not compute."""
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
                explain(named, given, "is computed in global layers only, here in local ones too", _OTHER)
            )
        return found
    local_theta = family.local_theta or theta
    if given.keys() & {SLIDING, FULL}:
        if extra := given.keys() - {SLIDING, FULL}:
            raise ConfigError(explain(named, sorted(extra), "is neither of local nor of global layers", _OTHER))
        both = given
    else:  # as before transformers 5: of global layers
        local = _positive(config.get("rope_local_base_freq"), f"{where}: rope_local_base_freq", local_theta)
        both = {FULL: given, SLIDING: {"rope_type": "default", "rope_theta": local}}
    found = _read_one(family, both.get(FULL) or {}, theta, config, f"{named}.{FULL}")
    local_found = _read_one(family, both.get(SLIDING) or {}, local_theta, config, f"{named}.{SLIDING}")
    if not fields.get("window"):
        return found
    if local_found["rope_scaling"] != "none":
        raise ConfigError(explain(f"{named}.{SLIDING}", both[SLIDING], "is scaled in local layers", _OTHER))
    same = local_found["rope_theta"] == found["rope_theta"]
    return {**found, "local_rope_theta": 0.0 if same else local_found["rope_theta"]}


def _check_same(parameters: Any, scaling: Any, where: str) -> None:
    """Raise ConfigError if the forms of transformers 5 and 4 say different things about the global layers."""
    if not isinstance(parameters, dict) or not isinstance(scaling, dict) or not parameters:
        return  # refused elsewhere, or said once
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
    elif kind == "su":  # the name in the first releases of Phi 3
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
    """Return the factor of attention, None for that of the paper."""
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
    """Raise ConfigError for parameters that change what is computed."""
    read = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_OF_TYPE[scaling]}
    read |= {"attention_factor", "mscale", "mscale_all_dim"} if scaling == "yarn" else set()
    read |= {"attention_factor", "factor", *_FACTORS} if scaling == "longrope" else set()
    for key, value in given.items():
        if key in read or value is None:
            continue
        if scaling == "yarn" and key in _YARN_ONLY and value in _YARN_ONLY[key]:
            continue
        if scaling in ("none", "linear") and key == "original_max_position_embeddings":
            continue  # no part of what these compute
        raise ConfigError(explain(f"{named}: {key}", value, "is not computed here", _OTHER))


def _positive(value: Any, named: str, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**40:
        raise ConfigError(explain(named, value, "is not a number above 0", "correct the file"))
    return float(value)


def written_rope(family: Family, model: ModelConfig) -> dict[str, Any]:
    """Return the rotary keys of a config.json, in the form of transformers 5 and, beside it, in that of 4."""
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
