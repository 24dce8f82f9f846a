"""Read, write, fingerprint and compare configs, and explain what is wrong with one."""

from __future__ import annotations

import collections
import difflib
import errno
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from springtide.config.code import check_trusted
from springtide.config.fields import fields, is_free
from springtide.config.input_paths import expand_home, look_beside
from springtide.config.recipes import FINE_TUNING, RECIPES
from springtide.config.renames import as_hashed, current, limit_and_remedy, lost, refused, without_defaults
from springtide.config.schema import Config
from springtide.config.yaml_text import Parsed, read_given, read_stored
from springtide.errors import ConfigError, RunExists, explain, redacted

RUN_CONFIG = "config.yaml"
"""Name of the resolved config in a run's folder."""
_BESIDE = {RUN_CONFIG: ("journal", "checkpoints", "leases"), "best.yaml": ("sweep.json",)}
"""Name of a config that springtide writes -> names of files and folders next to it. If one of them exists in the same folder,
springtide wrote the config there, for a run or a sweep. Otherwise a user wrote it."""
_MOST_BYTES = 2**20
"""Most bytes of a config file; PyYAML parses about a megabyte in ten seconds."""
_PROBLEMS_SHOWN = 30
_RECIPE = "recipe"
"""Key in a config file that names a recipe, from which settings that the file leaves out are taken."""
Base = Callable[[str, str], Config]
_FIELD = re.compile(r"([\w-]+(?:\.[\w-]+)*)(?= = |: )")
"""Dotted name of a setting at the beginning of an error message."""
_MENTIONED = re.compile(r"[a-z_]+\.[a-z_]+(?= = )")
"""Dotted names of settings that an error message shows with their values, as in ``optim.warmup = 100``."""


def build(data: Any) -> Config:
    """Return a config from nested dicts and lists that a user wrote; for a stored config see ``build_stored``. ConfigError
    lists every problem with field, value, limit and remedy. A renamed setting is a problem, and so is a retired setting that is
    not at its default."""
    if not isinstance(data, dict):
        raise ConfigError(f"a config is a mapping of sections, not {type(data).__name__}")
    data = without_defaults(data)
    problems, config = refused(data), None
    try:
        config = Config.model_validate(current(data) if problems else data)
    except ValidationError as error:
        problems.append(describe(error))
    if problems or config is None:
        raise ConfigError("\n".join(problems))
    return config


def build_stored(data: Any) -> Config:
    """Return a config from nested dicts and lists that are stored in a run, a checkpoint or a sweep. Retired and renamed
    settings are accepted, see ``config/renames.py``. Raises ConfigError like ``build``."""
    return build(current(data))


def recipe(name: str) -> Config:
    """Return the config of the recipe ``name``; ConfigError for an unknown name suggests the nearest one."""
    known = [*RECIPES, *FINE_TUNING]
    if name not in known:
        raise ConfigError(explain("recipe", name, f"known are {', '.join(known)}", nearest(name, known)))
    if name in FINE_TUNING:
        remedy = f"name its run: springtide train --recipe {name} --train.start-from runs/MODEL"
        raise ConfigError(explain("recipe", name, "goes on from a model", remedy))
    return RECIPES[name]()


def load_config(path: str | Path, trust_code: bool = False, base: Base | None = None) -> Config:
    """Load a config from a YAML or JSON file.

    The ``config.yaml`` in a run's folder and the ``best.yaml`` in a sweep's folder are stored by springtide: retired and
    renamed settings are accepted, as for ``--resume``. In any other file, also in a copy of a stored file, retired and renamed
    settings are refused, except retired settings at their defaults. The file may name a recipe (``recipe: tiny``): all settings
    that the file leaves out are taken from it.

    Args:
        path: the file, such as the ``config.yaml`` of a run.
        trust_code: accept a file that names code to run (``Config.needs_trust``, ``Config.prepare_sources``).
        base: function that returns a recipe's settings, given its name and the file's ``train.start_from``; by default
            ``recipe``, which knows only recipes that start from new weights.

    Raises:
        ConfigError: the file cannot be read or is not a valid config; the file names code and ``trust_code`` is not set; or
            a stored config has a retired setting that changed the training, which this version cannot do.

    Examples:
        >>> st.load_config("runs/mine/config.yaml").run.id
        'mine'
    """
    try:
        text = _bytes(Path(path))
        if is_stored := _is_stored(Path(path)):
            check_nothing_lost(text, str(path))
        config = (
            parse(text, str(path), True) if is_stored else _parse_given(text, str(path), base, str(Path(path).parent))
        )
    except OSError as error:
        raise ConfigError(
            explain("config", str(path), f"cannot be read ({error.strerror})", "check the path")
        ) from None
    check_trusted(config.prepare_sources | config.needs_trust, str(path), trust_code)
    return config


def _bytes(path: Path) -> bytes:
    """Return the bytes of a file, at most one more than the limit that ``parse`` checks. Raises OSError."""
    if path.exists() and not path.is_file() and not path.is_dir():  # reading a pipe would wait for its writer
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    with path.open("rb") as file:
        return file.read(_MOST_BYTES + 1)


def _is_stored(path: Path) -> bool:
    """Return whether springtide wrote this config into the folder of a run or a sweep."""
    return any((path.parent / name).exists() for name in _BESIDE.get(path.name, ()))


def parse(text: bytes, name: str = RUN_CONFIG, is_stored: bool = True) -> Config:
    """Parse YAML or JSON into a config, the inverse of ``dump``.

    Args:
        text: content of a config file.
        name: name of the file, for the error.
        is_stored: whether a run or a sweep stored the text: renamed and retired settings are then accepted, else refused.

    Raises:
        ConfigError: ``text`` is not YAML, or not a valid config.
    """
    if not is_stored:
        return _parse_given(text, name)
    _check_size(text, name)
    data = read_stored(text, name)
    try:
        return build_stored(data)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _parse_given(text: bytes, name: str, base: Base | None = None, folder: str = "") -> Config:
    """Parse a config that a person wrote. ``base``: as for ``load_config``; ``folder``: the folder of the file."""
    _check_size(text, name)
    given = read_given(text, name, "config", Config)
    try:
        expand_home(given.data)
        beside = look_beside(given.data, folder)
        config = build(_on_recipe(given.data, base))
    except ConfigError as error:
        raise ConfigError(_located(str(error), name, given)) from None
    config.corpus.with_paths(beside)
    return config


def check_nothing_lost(text: bytes, name: str, unless: str = "") -> None:
    """Raise ConfigError if a stored config has retired settings that changed the training. This version would ignore them.

    Args:
        text: content of the config file.
        name: name of the file, for the error.
        unless: command-line option that trains on without these settings, such as ``--accept-changes``, for the error's remedy;
            empty if there is none.
    """
    remedy = f"; or pass {unless} to train on without it" if unless else ""
    _check_size(text, name)
    if problems := lost(read_stored(text, name)):
        raise ConfigError("\n".join(f"{name}: {one}{remedy}" for one in problems))


def _check_size(text: bytes, name: str) -> None:
    """Raise ConfigError, which names the file, if ``text`` is too large."""
    if len(text) > _MOST_BYTES:
        raise ConfigError(explain("config", name, f"is larger than {_MOST_BYTES:,} bytes", "is it a config?"))


def _on_recipe(data: Any, base: Base | None) -> Any:
    """Return the data of a config file, with settings that it leaves out taken from the recipe that it names."""
    if not isinstance(data, dict):
        return data
    # YAML reads a section whose lines are all comments as null: make it an empty section
    data = {section: {} if values is None else values for section, values in data.items()}
    if _RECIPE not in data:
        return data
    name, train = data.pop(_RECIPE), data.get("train")
    start_from = train.get("start_from") if isinstance(train, dict) else ""
    found = base(str(name), str(start_from or "")) if base else recipe(str(name))
    whole = found.model_dump(mode="json")
    for section, values in data.items():
        is_table = isinstance(values, dict) and section in whole
        whole[section] = whole[section] | values if is_table else values
    return whole


def _located(problems: str, name: str, given: Parsed) -> str:
    """Add context to the problems of a config, one per line. A field that is in the file gets the file name and the line
    number. A value that is not in the file gets its origin: the recipe or the defaults."""
    found = []
    of = f"recipe {given.data[_RECIPE]!r}" if isinstance(given.data, dict) and _RECIPE in given.data else "the defaults"
    for problem in problems.splitlines():
        match = _FIELD.match(problem)
        path = tuple(match[0].split(".")) if match else ()
        line = f"{name}:{given.line(path)}: {problem}" if path[:1] in given.lines else f"{name}: {problem}"
        mentioned = dict.fromkeys(one for one in _MENTIONED.findall(problem) if one in fields())
        left_out = [one for one in mentioned if tuple(one.split(".")) not in given.lines]
        found.append(f"{line} ({', '.join(left_out)}: not in this file, from {of})" if left_out else line)
    return "\n".join(found)


def dump(config: Config) -> str:
    """Return the config as YAML. ``parse`` of the YAML returns an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def flatten(config: Config) -> dict[str, Any]:
    """Return dotted name -> plain value, for every field of the config."""
    data = config.model_dump(mode="json")
    return {name: data[name.split(".")[0]][name.split(".")[1]] for name in fields()}


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """Implement ``Config.override``: return a copy of ``config`` with ``changes``, dotted name -> new value."""
    data = config.model_dump(mode="json")
    for name, value in changes.items():
        if name not in fields():
            limit, remedy = limit_and_remedy(name) or ("is not a setting", nearest(name, fields()))
            raise ConfigError(explain(name, value, limit, remedy))
        section, field = name.split(".")
        data[section][field] = value
    changed = build(data)
    changed.corpus.with_paths(config.corpus.paths)
    return changed


def difference(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return dotted name -> (old, new) for every field that differs."""
    before, after = flatten(old), flatten(new)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def changes_the_run(changes: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Return the entries of ``changes`` (from ``difference``) whose fields decide what is learned."""
    return {name: change for name, change in changes.items() if not is_free(name)}


def check_same_run(old: Config, new: Config, accept_changes: bool) -> None:
    """Raise RunExists, which lists every difference, if ``new`` would change what a run that began with ``old`` learns.
    ``accept_changes``: do not raise. Differences in free fields (those that may change at a resume) and in passwords in URLs
    are ignored, and so is an empty ``shards.dataset`` in ``new``."""
    changed = {
        name: change
        for name, change in changes_the_run(difference(old, new)).items()
        if not (name == "shards.dataset" and not new.shards.dataset)
        and len({redacted(repr(one)) for one in change}) > 1
    }
    if changed and not accept_changes:
        shown = redacted("".join(f"\n  {name}: {old!r} -> {new!r}" for name, (old, new) in changed.items()))
        raise RunExists(
            f"run.id = {new.run.id!r} cannot resume under a config that trains something else:{shown}\n"
            "undo the change, choose another run.id, or pass --accept-changes"
        )


def fingerprint(config: Config) -> str:
    """Hash every field that decides what is learned, that is, all but the free fields (those that may change at a resume): 16
    hex digits. Passwords in URLs are left out, because whoever can read the hash could use it to guess them. The hash of the
    same settings has not changed since commit 0ba2dd87, whatever settings were added, renamed or retired since
    (``config/renames.py``)."""
    sections = {
        section: {name: value for name, value in values.items() if not is_free(f"{section}.{name}")}
        for section, values in config.model_dump(mode="json").items()
    }
    hashed = as_hashed(sections)
    identity = {f"{section}.{name}": value for section, values in hashed.items() for name, value in values.items()}
    return hashlib.sha256(redacted(json.dumps(identity, sort_keys=True, allow_nan=False)).encode()).hexdigest()[:16]


def nearest(name: str, known: Any) -> str:
    """Return a remedy for an unknown name: the closest of the ``known`` names."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else "see --help for all of them"


def describe(error: ValidationError) -> str:
    """Return the problems that pydantic found, one per line, each as ``field = value: problem; remedy``."""
    lines, messages = dict[str, None](), collections.defaultdict(list)
    for item in error.errors():
        messages[_field(item["loc"])].append(in_words(item))
    for item in error.errors():
        name = _field(item["loc"])
        if item["type"] == "extra_forbidden":
            section = fields() if "." in name else Config.model_fields
            # only for problems that are shown: ``nearest`` takes milliseconds, and a hostile file may have 100,000 unknown
            # names
            remedy = nearest(name, section) if len(lines) < _PROBLEMS_SHOWN else ""
            lines[explain(name, item["input"], "is not a setting", remedy)] = None
        elif item["type"] == "value_error" and name not in fields() and isinstance(item["input"], dict | Config):
            lines[str(item["ctx"]["error"])] = None
        else:
            field = fields().get(name)
            remedy = f"it is: {field.description}" if field is not None else "see --help"
            said = ", and ".join(messages[name])
            is_missing = item["type"] == "missing"  # the input is then the whole table: do not show it
            lines[f"{name}: {said}; {remedy}" if is_missing else explain(name, item["input"], said, remedy)] = None
    more = [f"and {len(lines) - _PROBLEMS_SHOWN} more"] if len(lines) > _PROBLEMS_SHOWN else []
    return "\n".join([*lines][:_PROBLEMS_SHOWN] + more)


def _field(loc: tuple[int | str, ...]) -> str:
    """Return the dotted name of a field, without the type that pydantic appends if the field accepts several types."""
    name = ".".join(str(part) for part in loc[:2])
    return (
        name if name in fields() and not isinstance(fields()[name].default, tuple | dict) else ".".join(map(str, loc))
    )


# Remove passwords from a config's URLs, so that it may be shown or sent.


def redact(config: Config) -> Config:
    """Return a copy without the passwords, tokens and signatures in URLs. The copy is a valid config, but servers may refuse
    its URLs."""
    return build(_without(config.model_dump(mode="json")))


def secret_fields(config: Config) -> list[str]:
    """Return the dotted names of the fields that hold a password, token or signature."""
    return [name for name, value in flatten(config).items() if _without(value) != value]


def _without(value: Any) -> Any:
    match value:
        case str():
            return redacted(value)
        case list():
            return [_without(one) for one in value]
        case dict():
            return {key: _without(one) for key, one in value.items()}
    return value


# Words for users in place of pydantic's messages about a bad value.

_WORDS = {
    "bool_parsing": "is neither true nor false",
    "bool_type": "is neither true nor false",
    "dict_type": "is not a table of names and values",
    "finite_number": "is not a finite number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "is not a whole number",
    "int_parsing": "is not a whole number",
    "int_parsing_size": "has too many digits",
    "int_type": "is not a whole number",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "is not a list",
    "literal_error": "is not one of {expected}",
    "missing": "is missing",
    "model_type": "is not a table of names and values",
    "string_pattern_mismatch": "does not match the pattern {pattern}",
    "string_too_long": "is longer than {max_length} characters",
    "string_too_short": "is shorter than {min_length} characters",
    "string_type": "is not a text",
    "too_long": "has more than {max_length} values",
    "too_short": "has fewer than {min_length} values",
    "tuple_type": "is not a list",
    "value_error": "{error}",
}
"""Type of pydantic's error -> our message; words in braces are filled in from the error's context."""


def in_words(found: Mapping[str, Any]) -> str:
    """Return a finding of pydantic in our words: the part of an error message after the value, such as ``must be at least 1``.

    Args:
        found: an entry of ``ValidationError.errors()``, with type, message and context.

    Examples:
        >>> from springtide.config.files import in_words
        >>> in_words({"type": "greater_than_equal", "msg": "Input should be ...", "ctx": {"ge": 1}})
        'must be at least 1'
        >>> in_words({"type": "of a later pydantic", "msg": "Input should be a date"})
        'Input should be a date'
    """
    words = _WORDS.get(found["type"], "")
    return words.format(**found.get("ctx", {})) if words else str(found["msg"])
