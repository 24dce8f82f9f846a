"""A population (PBT; Jaderberg et al., 2017): trials that train in parallel. The worst trials continue from the checkpoints of
the best trials, with points (values of config fields) near the best trials' points. Each such takeover starts a new run of the
worse trial, called a generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from springtide.errors import ConfigError, explain
from springtide.tune.space import Point, Sweep
from springtide.tune.trial import name_of

SECTION = "optim."
_FIXED = ("optim.optimizer",)


class Generation(NamedTuple):
    """One run of a trial of a population. A trial starts a new run each time it continues from another trial's checkpoint."""

    run: str
    """Id of the run."""
    point: Point
    of: str = ""
    """URL of the checkpoint that the run started from; empty if it started from scratch."""


def with_takeover(number: int, lineage: Sequence[Generation], point: Point, of: str) -> list[Generation]:
    """Return the lineage of trial ``number`` (its runs, oldest first) with a new run at the end. The new run has the field
    values ``point`` and continues from the checkpoint ``of`` (a URL)."""
    return [*lineage, Generation(f"{name_of(number)}-{len(lineage)}", point, of)]


def check_population(sweep: Sweep, scheduler: str) -> None:
    """Raise ConfigError if the space has a field that cannot change during training or that ``scheduler`` cannot choose, or if
    the budget has fewer than two trials."""
    for one in sweep.space:
        if not one.field.startswith(SECTION) or one.field in _FIXED:
            limit = f"cannot change while a trial trains, but --scheduler {scheduler} changes it"
            raise ConfigError(explain("SPACE", one.field, limit, f"keep only fields of {SECTION[:-1]}, or use asha"))
        if one.kind == "choice" and scheduler == "pb2":
            raise ConfigError(explain("SPACE", one.field, "is a choice, and pb2 takes only ranges", "use pbt"))
    if sweep.budget.trials < 2:
        raise ConfigError(explain("BUDGET.trials", sweep.budget.trials, "is too few for a population", "use 4 or more"))


def clamped(sweep: Sweep, point: Point) -> Point:
    """Return ``point`` with every number clamped to the range of its field; values of choice fields stay unchanged."""
    return {
        one.field: point[one.field] if one.kind == "choice" else one.clamped(point[one.field]) for one in sweep.space
    }


def shares(sweep: Sweep, point: Point) -> dict[str, float]:
    """Return field -> position of its value in the field's range: 0 at the low end, 1 at the high end. Choice fields are left
    out."""
    return {one.field: one.place(point[one.field]) for one in sweep.space if one.kind != "choice"}


def point_at(sweep: Sweep, found: dict[str, Any]) -> Point:
    """Return the point (field values) at the positions ``found`` in the fields' ranges (0: low end, 1: high end). Inverse of
    ``shares``."""
    return {one.field: one.at(min(max(float(found[one.field]), 0.0), 1.0)) for one in sweep.space}
