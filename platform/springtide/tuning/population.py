"""A population: trials that train side by side, of which the worst go on from the state of the best, at a point near theirs
(Jaderberg et al., 2017). Each such turn is a new run of the trial, a generation."""

from __future__ import annotations

from typing import Any, NamedTuple

from springtide.errors import ConfigError, explain
from springtide.store import Folder
from springtide.tuning.space import Point, Sweep
from springtide.tuning.trial import name_of

SECTION = "optim."
_FIXED = ("optim.optimizer",)
_FOLDER = "lineage"
POINTS = "points"
"""Where a sweep notes the points that its trials begin with."""


class Generation(NamedTuple):
    """One run of a trial."""

    run: str
    """Its id."""
    point: Point
    of: str = ""
    """URL of the checkpoint that it began with; empty where it began anew."""


def lineage_of(folder: Folder, number: int, point: Point) -> list[Generation]:
    """The generations of trial ``number`` of the sweep in ``folder``, oldest first; one, if it never turned: at
    the point that was noted, else at ``point``."""
    notes, file = folder / _FOLDER, f"{name_of(number)}.json"
    if notes.exists(file):
        return [Generation(**one) for one in notes.read_json(file)]
    noted = folder / POINTS
    return [Generation(name_of(number), noted.read_json(file) if noted.exists(file) else point)]


def turned(folder: Folder, number: int, lineage: list[Generation], point: Point, of: str) -> list[Generation]:
    """``lineage`` with a run more, which goes on at ``point`` from the checkpoint ``of``; written down before it begins."""
    longer = [*lineage, Generation(f"{name_of(number)}-{len(lineage)}", point, of)]
    (folder / _FOLDER).write_json(f"{name_of(number)}.json", [one._asdict() for one in longer])
    return longer


def check_population(sweep: Sweep, scheduler: str) -> None:
    """ConfigError for a field that cannot change while a trial trains, or that ``scheduler`` cannot choose."""
    for one in sweep.space:
        if not one.field.startswith(SECTION) or one.field in _FIXED:
            limit = f"cannot change while a trial trains, as --scheduler {scheduler} would have it"
            raise ConfigError(explain("SPACE", one.field, limit, f"leave fields of {SECTION[:-1]} in, or use asha"))
        if one.kind == "choice" and scheduler == "pb2":
            raise ConfigError(explain("SPACE", one.field, "is a choice, and pb2 knows ranges alone", "use pbt"))
    if sweep.budget.trials < 2:
        raise ConfigError(explain("BUDGET.trials", sweep.budget.trials, "is no population", "have 4 or more"))


def clamped(sweep: Sweep, point: Point) -> Point:
    """``point`` with every number inside its range."""
    return {
        one.field: point[one.field]
        if one.kind == "choice"
        else type(one.values[0])(min(max(point[one.field], one.values[0]), one.values[1]))
        for one in sweep.space
    }


def shares(sweep: Sweep, point: Point) -> dict[str, float]:
    """How far along its range, from 0 to 1, each number of ``point`` lies."""
    return {one.field: one.place(point[one.field]) for one in sweep.space if one.kind != "choice"}


def point_at(sweep: Sweep, found: dict[str, Any]) -> Point:
    """The point whose ``shares`` are ``found``."""
    return {one.field: one.at(min(max(float(found[one.field]), 0.0), 1.0)) for one in sweep.space}
