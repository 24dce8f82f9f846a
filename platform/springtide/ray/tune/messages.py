"""Messages between the driver of a sweep and the processes of its trials, sent through Ray Tune."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterator
from typing import NotRequired, Protocol, TypedDict, cast

from springtide.checkpoint import leases
from springtide.config import Config
from springtide.events import Event
from springtide.ray.train.worker_lender import WorkerLender
from springtide.ray.tune.worker_pool import WorkerPoolHandle
from springtide.storage import Folder
from springtide.tune import Point, Sweep, SweepFolder, TrialEnd


class TrainFunction(Protocol):
    """``springtide.api.train.train``, as a trial calls it."""

    def __call__(
        self, config: Config, *, resume: bool, listen: Callable[[Event], None], dashboard: bool, workers: WorkerLender
    ) -> object: ...


@dataclasses.dataclass(frozen=True)
class TrialJob:
    """Data that the process of every trial needs. It is the same for all trials of a sweep. The config contains passwords, so
    nothing that Tune saves in a file may refer to this object."""

    base: Config
    """Config of all trials, before a trial's point (its settings) is applied."""
    sweep: Sweep
    held: HeldSweep
    pool: WorkerPoolHandle
    train: TrainFunction
    report: Callable[[Folder], None]
    """Function that writes the HTML report of the run in a folder."""
    decided: frozenset[int] = frozenset()
    """Numbers of the trials that an earlier start of the sweep has ended: these trials must not continue."""
    population: bool = False
    """Whether trials take over each other's state, as in population-based training."""
    settled_step: int = 0
    """For a population: the step up to which the results of all trials are known from an earlier start of the sweep."""


class TrialSpec(TypedDict):
    """A trial, as the driver sends it to the trial's process. A population's scheduler may change the point (the trial's
    settings)."""

    number: int
    point: Point
    shares: NotRequired[dict[str, float]]
    """Name of a setting -> position of the trial's value within the setting's range, from 0 to 1. Only schedulers of
    populations use it."""
    of: NotRequired[str]
    """URL of the checkpoint of another trial from which this trial continues."""


class TrialParameters(TypedDict):
    """The ``config`` that Ray Tune passes to a trial."""

    trial: TrialSpec


class TrialResult(TypedDict, total=False):
    """A trial's result, as its process sends it to the driver. If the trial was never evaluated, the result has only the
    trial's number, the fields that say how it ended, and the worst possible value as the objective."""

    number: int
    heldout_loss: float
    heldout_bits_per_byte: float
    heldout_bits_per_byte_mean: float
    loss: float
    step_worker_s: float
    memory_bytes: float
    step: int
    rung: int
    tokens: int
    worker_s: float
    dollars: float
    of: str
    """URL of the checkpoint of another trial from which the trial's current run started; empty if it started from scratch."""
    state: str
    """URL of the run's checkpoint of step ``step``."""
    replayed: bool
    """True if an earlier start of the sweep already had this result and used it to decide whether the trial continues."""
    failed: str
    """Why the training failed; missing if it did not fail."""
    held: str
    """An error that names another driver, which has claimed the sweep or the run; missing if there is none. If it is set, this
    driver may record nothing for the trial."""
    done: bool
    """Whether this is the trial's last result; Tune also sets it for a trial that it stops."""
    over: bool
    """Whether the trial's run has ended. Unlike ``done``, it is not set for a trial that Tune stops."""


def value_of(result: TrialResult, metric: str) -> float:
    """Return the value of ``metric``, which is an objective or a cost; raises KeyError for a cost if the trial was never
    evaluated."""
    return cast("dict[str, float]", result)[metric]


def at_worst(result: TrialResult, sweep: Sweep) -> TrialResult:
    """Return ``result`` as the last result of a trial that has failed, belongs to another driver or was never evaluated. Its
    objective is set to the worst value, because Tune would end the whole sweep at a result without an objective."""
    return cast("TrialResult", {**result, sweep.metric: sweep.worst, "done": True})


# Handle of a sweep that this driver has claimed by a lease. Once another driver has claimed the sweep, writes are refused.


@dataclasses.dataclass(frozen=True)
class HeldSweep:
    """A sweep's folder, and the number (term) of the driver's lease on it. Ray Tune pickles this object into a file, so it must
    not contain the config, which has passwords."""

    folder: SweepFolder
    term: int

    def check(self) -> None:
        """Raise RunExists if another driver has claimed the sweep."""
        leases.check(self.folder.root, self.term)

    def begin_trial(self, number: int, point: Point) -> None:
        """Record a trial's point (its settings) before the trial starts. Raises RunExists if another driver has claimed the
        sweep."""
        self.check()
        self.folder.write_point(number, point)

    def end_trial(self, number: int, status: str, reason: str) -> None:
        """Record that a trial must not continue, and why. Raises RunExists if another driver has claimed the sweep."""
        self.check()
        self.folder.write_end(number, TrialEnd(status, reason))


@contextlib.contextmanager
def hold_sweep(folder: SweepFolder) -> Iterator[HeldSweep]:
    """Claim the sweep for this driver, by a lease, until the block ends. Raises RunExists if another driver has claimed the
    sweep."""
    lease = leases.claim(folder.root, secrets.token_hex(8), trains=False)
    try:
        yield HeldSweep(folder, lease.term)
    finally:
        leases.end(folder.root, lease.term)
