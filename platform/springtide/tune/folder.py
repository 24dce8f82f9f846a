"""The folder of a sweep: the paths of its files, and every read and write of these files. A driver writes only while it holds
the sweep's lease (a lock with a time limit), which the caller checks.

<root>/<sweep id>/sweep.json      the space, and how points are chosen from it
                  leases/         which driver may write to the sweep
                  points/         one file per trial: the values of its fields, written before it starts
                  trials/         one run per trial
                  lineage/        the runs of each trial of a population (PBT), with the checkpoints they continued from
                  ended/          trials that ended before they finished and must not continue, and why
                  finalists.json  the trials whose points are trained again with other seeds, and how their repeats are numbered
                  result.json     every trial's evaluations and costs, and the best trial
                  sweep.html      the result as an HTML page
                  best.yaml       config of the best trial, for `springtide train --config`
                  mlflow.json     the sweep's MLflow run
                  ray/            Ray Tune's own state
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from springtide import config as configs
from springtide.config import Config
from springtide.config.renames import newest_name
from springtide.errors import ConfigError, damaged, explain
from springtide.storage import Folder
from springtide.tune.population import Generation
from springtide.tune.rank import SweepResult
from springtide.tune.space import Budget, Point
from springtide.tune.trial import name_of, number_of

PLAN = "sweep.json"
"""Name of the file that marks a folder as a sweep, with the sweep's space and search settings."""
_FINALISTS = "finalists.json"
_RESULT = "result.json"
PAGE = "sweep.html"
_BEST = "best.yaml"
FORMAT = 1
"""Format number of all files of a sweep's folder; ``sweep.json`` contains it. Increase it when a reader of the previous format
would misread or refuse the new files. A ``sweep.json`` without a number has format 1."""
_TRIAL_FILE = re.compile(r"trial-\d{4,9}\.json")


class TrialEnd(NamedTuple):
    """Why a trial of a sweep must not continue."""

    status: str
    """``stopped`` or ``failed``."""
    reason: str


class Chosen(NamedTuple):
    """The finalists (trials whose points are trained again with other seeds), and how the repeats are numbered."""

    numbers: list[Annotated[int, Field(ge=0, lt=10**9)]]
    """Trial numbers of the finalists, best first."""
    trials: Annotated[int, Field(gt=0, lt=10**9)]
    """``BUDGET.trials``, which is also the trial number of the first repeat of a finalist."""
    seeds: Annotated[int, Field(gt=1, lt=10**9)]
    """``BUDGET.seeds``: number of seeds per finalist. The first seed is the finalist's own trial; each other seed is a
    repeat."""

    def repeated_by(self, number: int) -> int:
        """Return the trial number of the finalist that trial ``number`` repeats; -1 if it repeats no finalist.

        >>> [Chosen([3, 1], trials=4, seeds=3).repeated_by(number) for number in range(9)]
        [-1, -1, -1, -1, 3, 3, 1, 1, -1]
        """
        at = (number - self.trials) // (self.seeds - 1)
        return self.numbers[at] if 0 <= at < len(self.numbers) else -1


_PLAN_OF: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
_POINT: TypeAdapter[Point] = TypeAdapter(Point)
_LINEAGE = TypeAdapter(Annotated[list[Generation], Field(min_length=1)])
_END = TypeAdapter(TrialEnd)
_CHOSEN: TypeAdapter[Chosen | list[int]] = TypeAdapter(Chosen | list[Annotated[int, Field(ge=0, lt=10**9)]])


@dataclasses.dataclass(frozen=True)
class SweepFolder:
    """A handle on a sweep's folder. Every call reads the files anew, and raises DamagedFile for unexpected content."""

    root: Folder

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def url(self) -> str:
        return self.root.url

    @property
    def trials(self) -> Folder:
        """The folder with one run (config, events, checkpoints) per trial."""
        return self.root / "trials"

    @property
    def page(self) -> str:
        """Path or URL of the HTML page with the sweep's result."""
        return self.root.where(PAGE)

    @property
    def tune_path(self) -> str:
        """Path or URL of the folder with Ray Tune's own state."""
        return self.root.where("ray")

    def plan(self) -> dict[str, Any] | None:
        """Return the sweep's space and how points are chosen from it; None if no sweep was started in this folder. Raises
        ConfigError if the folder is in another format."""
        if not self.root.exists(PLAN):
            return None
        plan = self.root.read_as(PLAN, _PLAN_OF)
        if (written := plan.pop("format", FORMAT)) != FORMAT:
            limit = f"is in format {written!r:.40}, this version of springtide reads {FORMAT}"
            raise ConfigError(
                explain("--name", self.root.where(PLAN), limit, "use the version that wrote it, or another name")
            )
        return plan

    def write_plan(self, plan: dict[str, Any]) -> None:
        self.root.write_json(PLAN, {"format": FORMAT, **plan})

    def points(self) -> dict[int, Point]:
        """Return trial number -> point (field -> value) of all started trials, in order of number. Fields that a newer version
        has renamed have their new names."""
        files = sorted(filter(_TRIAL_FILE.fullmatch, self._points.names()), key=number_of)
        return {number_of(file): self._point(file) for file in files}

    def _point(self, file: str) -> Point:
        return _under_new_names(self._points.read_as(file, _POINT))

    def write_point(self, number: int, point: Point) -> None:
        """Record the point of trial ``number``, unless an earlier start of the sweep has recorded one."""
        if not self._points.exists(_file(number)):
            self._points.write_json(_file(number), point)

    def lineage(self, number: int, point: Point) -> list[Generation]:
        """Return the generations (successive runs) of trial ``number``, oldest first. A trial that never continued from another
        trial's checkpoint has one generation, with the trial's recorded point, or with ``point`` if none is recorded."""
        if self._lineages.exists(_file(number)):
            found = self._lineages.read_as(_file(number), _LINEAGE)
            for one in found:
                if not re.fullmatch(rf"{name_of(number)}(-\d+)?", one.run):  # `run` becomes a path: allow no `../`
                    raise damaged(self._lineages.where(_file(number)), f"names {one.run!r:.100} as a run of this trial")
            return [one._replace(point=_under_new_names(one.point)) for one in found]
        recorded = self._points.exists(_file(number))
        return [Generation(name_of(number), self._point(_file(number)) if recorded else point)]

    def write_lineage(self, number: int, lineage: Sequence[Generation]) -> None:
        self._lineages.write_json(_file(number), [one._asdict() for one in lineage])

    def ended(self) -> frozenset[int]:
        """Return the numbers of the trials that have stopped or failed, and must not continue."""
        return frozenset(map(number_of, filter(_TRIAL_FILE.fullmatch, self._ended.names())))

    def end_of(self, number: int) -> TrialEnd | None:
        """Return why trial ``number`` must not continue; None if it may continue."""
        return self._ended.read_as(_file(number), _END) if self._ended.exists(_file(number)) else None

    def write_end(self, number: int, end: TrialEnd) -> None:
        self._ended.write_json(_file(number), end._asdict())

    def finalists(self, budget: Budget) -> Chosen | None:
        """Return the finalists; None before they are chosen. A file of an older version has only the numbers of the finalists;
        how repeats are numbered is then taken from ``budget``."""
        if not self.root.exists(_FINALISTS):
            return None
        found = self.root.read_as(_FINALISTS, _CHOSEN)
        return found if isinstance(found, Chosen) else Chosen(found, budget.trials, budget.seeds)

    def write_finalists(self, chosen: Chosen) -> None:
        self.root.write_json(_FINALISTS, chosen._asdict())

    def write_result(self, result: SweepResult) -> None:
        self.root.write_json(_RESULT, result.as_dict())

    def write_page(self, page: str) -> None:
        self.root.write(PAGE, page)

    def write_best(self, config: Config) -> None:
        """Write the best trial's config. If the config has a password, only the owner may read the file (on a local disk)."""
        self.root.write(_BEST, configs.dump(config), private=bool(configs.secret_fields(config)))

    @property
    def _points(self) -> Folder:
        return self.root / "points"

    @property
    def _lineages(self) -> Folder:
        return self.root / "lineage"

    @property
    def _ended(self) -> Folder:
        return self.root / "ended"


def _under_new_names(point: Point) -> Point:
    return {newest_name(field): value for field, value in point.items()}


def _file(number: int) -> str:
    return f"{name_of(number)}.json"
