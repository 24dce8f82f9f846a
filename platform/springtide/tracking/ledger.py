"""The ledger: how the time, money and energy of a run were spent, computed from the events in its journal.

Each second that a worker belongs to the run (a worker-second) counts under one category. So the categories sum to the run's
total worker time:

productive        new steps                        recomputed        steps that were trained before
data_stall        waiting for batches              checkpoint_stall  waiting for saves
evaluation        on held-out rows                 start_up          until the first worker group trains
resize            from one group to the next       waiting           for nodes, without a worker group
other             a profile, a sample, a comparison of ranks

The time between two worker groups is multiplied by the number of workers of the next group. The time until a failure is
detected counts for the workers of the failed group, because a hung group still occupies them. The energy of a step has the
category of the step. Energy used between two steps is split among the categories of the time between them, in proportion to
their seconds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from springtide.events import (
    Decided,
    Evaluated,
    Event,
    Failed,
    Left,
    Miscomputed,
    RolledBack,
    Started,
    StepDone,
    Straggling,
)

if TYPE_CHECKING:
    from springtide.config.schema import TrackConfig

KINDS = (
    "productive",
    "recomputed",
    "data_stall",
    "checkpoint_stall",
    "evaluation",
    "start_up",
    "resize",
    "waiting",
    "other",
)
_NOT_HELD = "paused"
"""Phase of a run that a user has paused. This time is not counted and costs nothing, because the run has no workers."""
SPOT = ("spot", "preemptible")
"""Values of Ray's market label for nodes that may be preempted; their workers cost the spot price."""
_KWH_J = 3.6e6
"""Joules in a kilowatt-hour."""


@dataclasses.dataclass(frozen=True)
class Restart:
    """The change from one worker group to the next."""

    time_s: float
    """Time at which the next group was set up and about to train, in seconds since 1970."""
    cause: str
    workers_before: int
    workers_after: int
    gap_s: float
    """Time from the end of the previous group's last step to the start of the next group's first step, without pauses [s]."""
    step: int
    """The step from which the next group resumed."""
    steps_lost: int


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The ledger of a run: its time, costs and energy by category, such as ``productive`` or ``evaluation``."""

    held: float
    """Total time of all workers of the run [worker-seconds]. Time between two groups counts for the next group's workers."""
    spent: dict[str, float]
    """Category of time, such as ``evaluation`` -> time spent [worker-seconds]; the values sum to ``held``."""
    restarts: list[Restart]
    stragglers: list[Straggling] = dataclasses.field(default_factory=list)
    """Events that report a straggler, a rank whose slow device delayed all ranks."""
    dollars: dict[str, float] = dataclasses.field(default_factory=dict)
    """Category of time, such as ``evaluation`` -> cost of the workers in that time [dollars]."""
    market_dollars: dict[str, float] = dataclasses.field(default_factory=dict)
    """Market -> cost of its workers [dollars]. ``spot``: on nodes that may be preempted; ``other``: on all other nodes."""
    tokens: int = 0
    """Tokens that the run has trained on [tokens]."""
    energy_kwh: dict[str, float] = dataclasses.field(default_factory=dict)
    """Category of time, such as ``evaluation`` -> energy that the workers measured in that time [kWh]."""
    energy_counted: float = 0.0
    """Time in which energy was measured [worker-seconds]. Excludes start-up, and the time after a worker group's last step."""
    energy_sources: list[str] = dataclasses.field(default_factory=list)
    """Each way in which worker groups measured energy (``Started.energy_source``), as text."""

    @property
    def goodput(self) -> float:
        """Share of the run's total worker time that was spent on new steps, from 0 to 1."""
        return self.spent["productive"] / self.held if self.held else 0.0

    @property
    def total_dollars(self) -> float:
        """Cost of the run's total worker time [dollars]."""
        return sum(self.dollars.values())

    @property
    def total_kwh(self) -> float:
        """Energy measured in the whole run [kWh]."""
        return sum(self.energy_kwh.values())

    @property
    def dollars_per_million_tokens(self) -> float:
        """Cost of the run per million tokens trained on [dollars]."""
        return 1e6 * self.total_dollars / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the ledger as plain data, as ``springtide report --json`` prints it."""
        figures = {
            "goodput": self.goodput,
            "tokens": self.tokens,
            "dollars_per_million_tokens": self.dollars_per_million_tokens,
        }
        return {**figures, **dataclasses.asdict(self)}


def costs(steps: Iterable[StepDone]) -> dict[str, float]:
    """Return two figures of ``steps``. ``step_worker_s``: the median over steps of duration times number of workers
    [worker-seconds]. ``memory_bytes``: the highest peak memory of a device [bytes]. Both are NaN without steps."""
    known = list(steps)
    if not known:
        return {"step_worker_s": math.nan, "memory_bytes": math.nan}
    worker_s = statistics.median(step.step_time_s * step.world_size for step in known)
    return {"step_worker_s": worker_s, "memory_bytes": float(max(step.memory_bytes for step in known))}


class Prices(NamedTuple):
    """Prices of one worker [dollars/hour], on spot nodes and on all other nodes."""

    other: float = 0.0
    spot: float = 0.0

    @classmethod
    def set_in(cls, track: TrackConfig) -> Prices:
        """Return the prices that the ``track`` section of a config sets."""
        return cls(track.price, track.spot_price)

    def of(self, event: Started) -> Prices:
        """Return the cost per second of a group's workers [dollars/s], separately for spot nodes and all other nodes.
        ``event``: the start of the group."""
        spot = sum(market in SPOT for market in event.markets)
        workers = len(event.markets) or event.world_size
        return Prices((workers - spot) * self.other / 3600, spot * self.spot / 3600)


_FREE = Prices()


class _EnergyBuilder:
    """Sums up the measured energy [J] of each category of time, such as ``productive``."""

    def __init__(self) -> None:
        self.joules = dict.fromkeys(KINDS, 0.0)
        self.counted = 0.0
        """Time in which energy was measured [worker-seconds]."""
        self.sources: list[str] = []
        self._between: dict[str, float] = {}
        """Category of time, such as ``evaluation`` -> seconds of it since the last step."""
        self._since_s = 0.0

    def start(self, event: Started) -> None:
        """Begin a worker group, whose energy counters start at 0."""
        self._between, self._since_s = {}, event.time_s
        if event.energy_source and event.energy_source not in self.sources:
            self.sources.append(event.energy_source)

    def pass_time(self, kind: str, seconds: float) -> None:
        """Add ``seconds`` of the category ``kind`` (such as ``evaluation``) to the time since the last step."""
        self._between[kind] = self._between.get(kind, 0.0) + seconds

    def step(self, event: StepDone, kind: str) -> None:
        """Add the energy that a step reports. The energy of the step itself counts under ``kind``. Energy used since the
        previous step is split among the categories of the time in between, in proportion to their seconds."""
        between, self._between = self._between, {}
        between.pop(kind, None)  # the step's own time gets no share of the energy between steps
        passed_s, self._since_s = max(0.0, event.time_s - self._since_s), event.time_s
        if not (math.isfinite(event.energy_j) and event.energy_j > 0):  # not measured, or the journal is damaged
            return
        between_j = min(event.energy_between_j, event.energy_j) if event.energy_between_j > 0 else 0.0
        total_s = sum(between.values())
        self.counted += passed_s * event.world_size
        self.joules[kind] += event.energy_j - between_j
        for cause, seconds in between.items() if total_s else [("other", 1.0)]:
            self.joules[cause] += between_j * (seconds / (total_s or 1.0))


class LedgerBuilder:
    """Updates a ledger event by event. Events must be sorted by driver (term) and then time. It stores restarts and stragglers,
    but no other events."""

    def __init__(self, prices: Prices = _FREE) -> None:
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.dollars = dict.fromkeys(KINDS, 0.0)
        self.energy = _EnergyBuilder()
        self.stragglers: list[Straggling] = []
        self._prices, self._dollars_per_s = prices, _FREE
        self._spot_dollars = self._other_dollars = 0.0
        self.restarts: list[Restart] = []
        self._workers = 0
        self._pending: dict[str, float] = {}
        self._now = 0.0
        self._phase = "start_up"
        self._cause = ""
        self.newest = 0
        """The greatest step trained so far; steps up to it count as recomputed."""
        self._tokens = 0
        self._term = -1
        self._last: StepDone | None = None
        self._started: tuple[Started, int] | None = None
        self._not_held_s = 0.0
        """How long the run was paused by a user, without workers, since its last step [s]."""

    def _begin_term(self, now: float) -> None:
        """Start to count the time of a new driver at ``now``. Time since the previous driver's last event is not counted."""
        self._pending = {}  # drop the previous driver's wait for a worker group that never started
        self._now, self._phase, self._workers = now, "start_up", 0
        self._cause = "the driver was started again" if self._last else ""

    def add(self, event: Event) -> None:
        """Add one event. If its time is before the time of the previous event, it adds no time."""
        if event.term > self._term:
            self._term = event.term
            self._begin_term(event.time_s)
        if isinstance(event, Evaluated) and event.asynchronous:
            return
        if event.from_controller:
            self._add_controller(event)
            return
        passed_s = max(0.0, event.time_s - self._now)
        self._now += passed_s
        match event:
            case Started():
                self._spend(self._phase, passed_s)
                self._stand(event)
            case StepDone():
                self._step(event, passed_s)
            case _:
                self._spend(event.charged_to if self._workers else self._phase, passed_s)
        if isinstance(event, Left):
            self._leave(self._cause or "asked to leave")
        elif isinstance(event, RolledBack):
            self._leave(f"rolled back: {event.reason}")
        elif isinstance(event, Miscomputed):
            self._leave(f"wrong results: {event.reason}")
        elif isinstance(event, Straggling):
            self.stragglers.append(event)

    def ledger(self) -> Ledger:
        """Return the ledger of the events so far."""
        spent, dollars = dict(self.spent), dict(self.dollars)
        return Ledger(
            held=sum(spent.values()),
            spent=spent,
            restarts=list(self.restarts),
            stragglers=list(self.stragglers),
            dollars=dollars,
            market_dollars={"spot": self._spot_dollars, "other": self._other_dollars},
            tokens=self._tokens,
            energy_kwh={kind: joules / _KWH_J for kind, joules in self.energy.joules.items()},
            energy_counted=self.energy.counted,
            energy_sources=list(self.energy.sources),
        )

    def _add_controller(self, event: Event) -> None:
        if isinstance(event, Failed):
            self._cause = f"{event.cause}: {event.reason}"
            if self._workers:
                self._hold(event.time_s)
                self._leave(self._cause)
        elif isinstance(event, Decided) and event.decision in ("leave", "replace"):
            self._cause = event.reason
            if event.decision == "replace" and self._workers:
                self._hold(event.time_s)
                self._leave(self._cause)
        if not self._workers and isinstance(event, Decided):
            passed_s = max(0.0, event.time_s - self._now)
            self._now += passed_s
            self._spend(self._phase, passed_s)
            if event.decision == "stay" and event.is_about_pause:
                self._phase = _NOT_HELD
            elif event.decision == "stay" and "waiting" in event.reason:
                self._phase = "waiting"
            elif self._phase in ("waiting", _NOT_HELD):
                self._phase = "resize" if self._last else "start_up"

    def _hold(self, until_s: float) -> None:
        """Count the time up to ``until_s``, when a failure was detected, for the workers of the failed group: a hung group
        still occupies them."""
        passed_s = max(0.0, until_s - self._now)
        self._now += passed_s
        self._spend("resize", passed_s)

    def _leave(self, cause: str) -> None:
        self._workers, self._phase, self._cause = 0, "resize", cause

    def _stand(self, event: Started) -> None:
        if self._workers:  # the event of the last group's end is lost or late: end it here
            self._leave(self._cause or "unknown")
        self._workers, self._dollars_per_s = event.world_size, self._prices.of(event)
        self._phase = "resize" if self._last else "start_up"  # ends a pause or a wait for nodes
        self._started = (event, self._last.world_size if self._last else 0)
        self._close()
        self.energy.start(event)

    def _step(self, event: StepDone, passed_s: float) -> None:
        step_s = min(event.step_time_s, passed_s)
        stall_s = min(event.data_wait_s, step_s)
        before_s = passed_s - step_s
        if self._started and self._last:
            started, workers = self._started
            gap_s = max(0.0, event.time_s - event.step_time_s - self._last.time_s - self._not_held_s)
            lost = self._last.step - started.step
            self.restarts.append(
                Restart(started.time_s, self._cause, workers, started.world_size, gap_s, started.step, lost)
            )
            self._spend("resize", before_s)
            self._cause = ""
        else:
            self._spend("start_up" if self._started else "checkpoint_stall", before_s)
        self._started, self._phase = None, "resize"
        kind = "productive" if event.step > self.newest else "recomputed"
        self._spend(kind, step_s - stall_s)
        self._spend("data_stall", stall_s)
        self.energy.step(event, kind)
        if event.step >= self.newest:
            self.newest, self._tokens = event.step, event.tokens
        self._last, self._not_held_s = event, 0.0

    def _spend(self, kind: str, seconds: float) -> None:
        if self._workers:
            self._charge(kind, seconds)
            self.energy.pass_time(kind, seconds)
        elif kind == _NOT_HELD:
            self._not_held_s += seconds
        else:
            self._pending[kind] = self._pending.get(kind, 0.0) + seconds

    def _close(self) -> None:
        """Count the time without any worker group. It is multiplied by the workers of the group that has now started."""
        for kind, seconds in self._pending.items():
            self._charge(kind, seconds)
        self._pending = {}

    def _charge(self, kind: str, seconds: float) -> None:
        self.spent[kind] += seconds * self._workers
        other, spot = self._dollars_per_s
        self.dollars[kind] += seconds * (other + spot)
        self._other_dollars += seconds * other
        self._spot_dollars += seconds * spot


def ledger(events: Iterable[Event], prices: Prices = _FREE) -> Ledger:
    """Return the ledger of a run: its time, costs and energy by category, such as training or saving.

    Args:
        events: all events of the run, in any order.
        prices: prices of a worker; without them every cost is 0.

    Returns:
        Time, cost and energy of each category, and every restart.

    Examples:
        >>> from springtide.tracking.ledger import Prices, ledger
        >>> book = ledger(st.open_run("runs/mine").events, Prices(other=3600.0))
        >>> round(book.total_dollars - book.held, 6), book.restarts
        (0.0, [])
    """
    book = LedgerBuilder(prices)
    for event in sorted(events, key=lambda event: (event.term, event.time_s)):
        book.add(event)
    return book.ledger()
