"""Task files of lm-evaluation-harness: whether they name code, told without running any."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path

import yaml

from springtide.config.files import check_depth
from springtide.errors import ConfigError, explain

_MOST_BYTES = 2**20
_PLAIN = {*yaml.SafeLoader.yaml_constructors, "tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"}
"""Tags of plain values."""
_FALSE = {"false", "no", "off"}
_FIELD, _METRIC = "task_files", "metric: "


def check_task_files(folder: str, metrics: Container[str], trust_code: bool = False) -> None:
    """Raise ConfigError if ``folder`` is none, or if a file in it is not YAML or names code.

    Code is what a tag such as ``!function`` or the key ``class`` names, or a metric that is not in ``metrics``: the package
    ``evaluate`` looks for it, and runs a file of that name in the current folder.

    Args:
        folder: path of the folder; every ``.yaml`` below it, and what these include, is read.
        metrics: names of the metrics that lm-evaluation-harness computes itself.
        trust_code: let files name code.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(explain(_FIELD, folder, "is not a folder", "name the folder of the tasks' YAML files"))
    waiting: list[tuple[Path, str]] = [(one, "") for one in sorted(root.rglob("*.yaml"))]
    seen = set[Path]()
    while waiting:
        path, includer = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for what, included in _found(path, includer, metrics):
            if what and not trust_code:
                remedy = "read it, then pass --trust-code, in Python trust_code=True"
                if what.startswith(_METRIC):
                    remedy = f"use a metric of lm-evaluation-harness itself, or {remedy}"
                raise ConfigError(explain(_FIELD, str(path), f"names code to run: {what}", remedy))
            if included is not None:
                waiting.append((included, str(path)))


def _found(path: Path, includer: str, metrics: Container[str]) -> Iterator[tuple[str, Path | None]]:
    """Yield what a file names of code, and each file that it includes. ``includer``: the file that includes it, if any."""
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for its writer
            raise OSError("it is no regular file")
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero in the name of a file that is included
        reason = getattr(error, "strerror", None) or str(error)
        remedy = f"correct the include of {includer}" if includer else "correct the path"
        raise ConfigError(explain(_FIELD, str(path), f"cannot be read ({reason})", remedy)) from None
    if len(data) > _MOST_BYTES:
        raise ConfigError(explain(_FIELD, str(path), f"has more than {_MOST_BYTES:,} bytes", "name task files only"))
    try:
        check_depth(data)
        node = yaml.compose(data, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f"is not YAML ({' '.join(str(error).split())[:300]})"
        raise ConfigError(explain(_FIELD, str(path), problem, "mend the file, or move it away")) from None
    waiting, seen = [node], set[int]()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:  # an alias is its anchor's node: it is not followed twice
            continue
        seen.add(id(one))
        if one.tag not in _PLAIN:
            yield f"{one.tag} {one.value if isinstance(one, yaml.ScalarNode) else ''}".strip(), None
        if isinstance(one, yaml.SequenceNode):
            waiting += one.value
        elif isinstance(one, yaml.MappingNode):
            for key, value in one.value:
                waiting += [key, value]
                yield from _of_key(str(key.value), value, path, metrics)


def _of_key(key: str, value: yaml.Node, path: Path, metrics: Container[str]) -> Iterator[tuple[str, Path | None]]:
    if key == "class":
        yield f"class: {value.value}", None
    elif key == "metric" and str(value.value) not in metrics:
        yield f"{_METRIC}{value.value}", None
    elif key == "hf_evaluate" and str(value.value).lower() not in _FALSE:
        yield f"{_METRIC}{key}: {value.value}", None
    elif key == "include":
        for one in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            yield "", path.parent / str(one.value)
