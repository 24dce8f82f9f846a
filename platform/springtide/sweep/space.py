"""A search space: which fields of a config vary, between which bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from springtide import config as configs
from springtide.config import Config
from springtide.errors import ConfigError, explain

_KINDS = ("uniform", "log_uniform", "choice")


@dataclasses.dataclass(frozen=True)
class Range:
    """One field's part of the space."""

    field: str
    kind: str
    values: tuple[Any, ...]
    """Low and high, or the choices."""


def read_space(table: Mapping[str, tuple[Any, ...]], base: Config) -> list[Range]:
    """The ranges of ``table``, each end tried on ``base``; ConfigError for an unknown field, kind or bound."""
    space = []
    for field, (kind, *values) in table.items():
        if kind not in _KINDS:
            raise ConfigError(explain(field, kind, f"kinds are {', '.join(_KINDS)}", configs.nearest(kind, _KINDS)))
        if kind != "choice" and (
            len(values) != 2 or not values[0] < values[1] or (kind == "log_uniform" and values[0] <= 0)
        ):
            raise ConfigError(explain(field, values, f"is no {kind} range", "give low < high, above 0 for log_uniform"))
        for value in values:
            configs.override(base, {field: value})
        space.append(Range(field, kind, tuple(values)))
    return space
