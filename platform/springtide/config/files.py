"""Configs as files and as identities: read, write, fingerprint, compare, and explain what is wrong with one."""

from __future__ import annotations

import collections
import difflib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from springtide.config.code import check_trusted
from springtide.config.fields import fields, is_free
from springtide.config.recipes import RECIPES
from springtide.config.schema import Config
from springtide.errors import ConfigError, RunExists, explain, redacted

RUN_CONFIG = "config.yaml"
"""The name of the resolved config in a run's folder."""


def build(data: Any) -> Config:
    """A config from plain data; ConfigError says field, value, limit and remedy for everything wrong with it."""
    if not isinstance(data, dict):
        raise ConfigError(f"a config is a mapping of sections, not {type(data).__name__}")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None


def recipe(name: str) -> Config:
    """The recipe of that name; ConfigError names the nearest."""
    if name not in RECIPES:
        raise ConfigError(explain("recipe", name, f"known are {', '.join(RECIPES)}", nearest(name, RECIPES)))
    return RECIPES[name]()


def load_config(path: str | Path, trust_code: bool = False) -> Config:
    """A config saved as YAML or JSON. One that names code to be run (``model.source``) is a ConfigError, unless
    ``trust_code``."""
    try:
        config = parse(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(
            explain("config", str(path), f"cannot be read ({error.strerror})", "check the path")
        ) from None
    check_trusted(config.model.source, str(path), trust_code)
    return config


def parse(text: bytes, name: str = RUN_CONFIG) -> Config:
    """The config that ``dump`` made ``text`` of; ``name`` is for the error."""
    try:
        return build(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(explain("config", name, f"is not YAML ({error})", "mend the file")) from None


def dump(config: Config) -> str:
    """The config as YAML; ``load`` gives back an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def flatten(config: Config) -> dict[str, Any]:
    """Dotted name -> plain value, for every field."""
    data = config.model_dump(mode="json")
    return {name: data[name.split(".")[0]][name.split(".")[1]] for name in fields()}


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """What ``Config.override`` returns."""
    data = config.model_dump(mode="json")
    for name, value in changes.items():
        if name not in fields():
            raise ConfigError(explain(name, value, "is not a setting", nearest(name, fields())))
        section, field = name.split(".")
        data[section][field] = value
    return build(data)


def difference(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (old, new) for every field that differs."""
    before, after = flatten(old), flatten(new)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def changes_the_run(changes: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Those of ``difference`` that would change what is learned."""
    return {name: change for name, change in changes.items() if not is_free(name)}


def check_same_run(old: Config, new: Config, accept_changes: bool) -> None:
    """RunExists, with every difference, when a run under ``old`` that went on under ``new`` would train something else and that
    was not accepted. Where it lives, and a dataset that is still to be found, are no difference."""
    changed = {
        name: change
        for name, change in changes_the_run(difference(old, new)).items()
        if not (name == "shards.dataset" and not new.shards.dataset)
    }
    if changed and not accept_changes:
        shown = redacted("".join(f"\n  {name}: {old!r} -> {new!r}" for name, (old, new) in changed.items()))
        raise RunExists(
            f"run.id = {new.run.id!r} cannot go on under a config that trains something else:{shown}\n"
            "undo the change, choose another run.id, or say --accept-changes"
        )


def fingerprint(config: Config) -> str:
    """16 hex digits over everything that decides what is learned; free fields do not count."""
    identity = {name: value for name, value in flatten(config).items() if not is_free(name)}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def nearest(name: str, known: Any) -> str:
    """A remedy for a name that is not known."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else "see --help for all of them"


def describe(error: ValidationError) -> str:
    """Pydantic's findings in the house's form, one line each."""
    lines, messages = [], collections.defaultdict(list)
    for item in error.errors():
        messages[_field(item["loc"])].append(item["msg"])
    for item in error.errors():
        name = _field(item["loc"])
        if item["type"] == "extra_forbidden":
            section = fields() if "." in name else Config.model_fields
            lines.append(explain(name, item["input"], "is not a setting", nearest(name, section)))
        elif item["type"] == "value_error" and isinstance(item["input"], dict | Config):
            lines.append(str(item["ctx"]["error"]))
        else:
            field = fields().get(name)
            remedy = f"it is: {field.description}" if field is not None else "see --help"
            lines.append(explain(name, item["input"], " or: ".join(messages[name]), remedy))
    return "\n".join(dict.fromkeys(lines))


def _field(loc: tuple[int | str, ...]) -> str:
    """The dotted name; where a value may be of several types pydantic adds which it tried."""
    name = ".".join(str(part) for part in loc[:2])
    return name if name in fields() and not isinstance(fields()[name].default, tuple) else ".".join(map(str, loc))
