"""Forecast the cost of a restart and the training time left, from the run's own events."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from springtide.elastic.patience import StartTimes

ASSUMED_LOSS_S = 4 * 3600.0
"""Initial estimate of the mean training time between two losses of workers [s]."""
_FIRST_RESTART_S = 10.0
"""Assumed time of a restart until one is measured [s]."""
_REMEMBERED = 9
_FEW_LEAVES, _MOST_LEAVE_STEPS = 3, 20
"""In a leave, a group is asked to copy or save its state and to end. Until ``_FEW_LEAVES`` leaves are recorded, a leave is
assumed to take at least ``STEPS_TO_LEAVE`` steps. If a group is lost before it leaves, the assumed number of steps doubles, up
to ``_MOST_LEAVE_STEPS``."""
_USUAL_STEPS = 20
"""A worker group counts as hung if it reports no event for longer than this many median step times."""
_FIRST_STEP = 12.0
"""Before a group's first step, its hang timeout is this many times longer: the group restores a checkpoint and may compile."""
_MOMENT_S = 1.0
"""Minimum that is recorded for the time from the start of a group's processes to its first collective [s]. If the driver first
polled the group after that collective, the real time is unknown and this minimum is recorded."""


class RunHistory:
    """Times of steps and restarts, collected from a run's events, which are added one by one in order of time."""

    def __init__(self, num_steps: int) -> None:
        """``num_steps``: number of steps of the whole run; 0 if it is not known."""
        self.step = 0
        self._num_steps = num_steps
        self._steps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._step_s = math.inf
        self._gaps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._saves_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._copies_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._leaves: deque[int] = deque(maxlen=_REMEMBERED)
        """For each recent request to leave (save the state and end): number of steps until the group left."""
        self._since_asked: int | None = None
        """Number of steps that have ended since the group was asked to leave; None if it was not asked."""
        self._last_s: float | None = None
        self._restarted = False
        self._is_starting = True
        self._is_forming = False
        """Whether the current group has not completed its first collective yet."""
        self._runs_since_s: float | None = None
        self._workers = 1
        self._forming_times = StartTimes(least_s=0.0, most_s=math.inf)

    def restart(self) -> None:
        """Record that a new group starts, so that its first collective and first step are still to come."""
        self._is_starting = self._is_forming = True
        self._runs_since_s, self._workers = None, 1

    def runs(self, workers: int, now: float) -> bool:
        """Record that the ``workers`` processes of the new group are running at ``now`` [s]. The time to the group's first
        collective is measured from ``now``. Return False if that collective is already done."""
        if self._is_forming:
            self._runs_since_s, self._workers = now, workers
        return self._is_forming

    def formed(self, now: float) -> None:
        """Record that the first collective of the new group is done at ``now`` [s]."""
        if self._is_forming:
            took_s = _MOMENT_S if self._runs_since_s is None else now - self._runs_since_s
            self._forming_times.add(max(took_s, _MOMENT_S), self._workers)
        self._is_forming = False

    def add(self, record: Mapping[str, Any]) -> None:
        """Record an event of the run, such as a step, a save or a leave. Other kinds of events are ignored."""
        kind = record["kind"]
        if kind == "started":
            # the last group was lost before it could leave as requested: assume more steps, to ask the next group earlier
            if self._since_asked is not None:
                self._leaves.append(min(2 * max(self._leave_steps, self._since_asked), _MOST_LEAVE_STEPS))
            self._since_asked = None
            self._restarted, self._is_starting = self._last_s is not None, True
            self._steps_s.clear()
        elif kind == "step":
            step_s = record["step_time_s"]
            if self._restarted and self._last_s is not None:
                self._gaps_s.append(max(0.0, record["time_s"] - self._last_s - step_s))
            self._restarted, self._last_s, self.step = False, record["time_s"], record["step"]
            self._is_starting = False
            self._steps_s.append(step_s)
            self._since_asked = None if self._since_asked is None else self._since_asked + 1
            self._step_s = statistics.median(self._steps_s)
        elif kind == "decided" and record["decision"] == "stay" and record["reason"].startswith("paused by"):
            self._last_s = None  # so that the time of a pause does not count as the time of a restart
        elif kind == "decided" and record["decision"] == "leave" and self._since_asked is None:
            self._since_asked = 0
        elif kind == "saved":
            self._saves_s.append(record["save_time_s"])
        elif kind == "left":
            if record["kept_in"] == "memory" and self._last_s is not None:
                self._copies_s.append(max(0.0, record["time_s"] - self._last_s))
            if self._since_asked is not None:
                self._leaves.append(self._since_asked)
            self._since_asked = None

    def longest_s(self, least_s: float) -> float:
        """Return how long a worker group may report no event before it counts as hung [s]: 20 median step times, but at least
        ``least_s``. Before the group's first step, the limit is 12 times ``least_s``. Before its first collective, the limit
        follows from the times that earlier groups of this run took to their first collective.

        >>> RunHistory(num_steps=0).longest_s(300.0)
        3600.0
        """
        if self._is_starting:
            most_s = _FIRST_STEP * least_s
            return min(most_s, max(least_s, self._forming_times.limit_s(self._workers))) if self._is_forming else most_s
        return max(least_s, _USUAL_STEPS * statistics.median(self._steps_s))

    def prospects(self) -> RestartForecast:
        """Return the current forecast of the cost of a restart and of the training time left."""
        left_s = (self._num_steps - self.step) * self._step_s if self._num_steps else math.inf
        restart_s = statistics.median(self._gaps_s) if self._gaps_s else _FIRST_RESTART_S
        save_s, copy_s = max(self._saves_s, default=0.0), max(self._copies_s, default=0.0)
        return RestartForecast(restart_s, left_s, self._step_s, save_s, copy_s, self._leave_steps)

    @property
    def _leave_steps(self) -> int:
        """Largest number of steps that a group recently took to leave after a request; at least ``STEPS_TO_LEAVE`` until
        ``_FEW_LEAVES`` leaves are recorded."""
        return max(*self._leaves, STEPS_TO_LEAVE if len(self._leaves) < _FEW_LEAVES else 1, 1)


# Forecast the cost of a restart, and how long before the loss of a node its group must be asked to save its state and end.

STEPS_TO_LEAVE = 2
"""Steps that a group needs to save its state and end after a request, assumed until the run has measured them. Once per step,
the ranks agree on the requests that have arrived. A request that arrives before this takes effect after the current step, a
later request after the next step."""
_SLOW_STEP = 1.2
"""Time of a slow step, as a multiple of the median step."""
_MARGIN = 1.5
_SAVES = 2.5
"""Time reserved for the last save before a node is lost, as a multiple of the time of a save. A periodic save may be under way
when the last save should begin, so there is time for two saves and a margin."""


class RestartForecast(NamedTuple):
    """Forecast with which to decide whether a restart pays off: what the restart costs, and how long the run still trains."""

    restart_s: float = 10.0
    left_s: float = math.inf
    """Training time that the run still needs at the current group size [s]."""
    step_s: float = 0.0
    """Time of a step. A group can end only between two steps. Infinite until a step is measured [s]."""
    save_s: float = 0.0
    """Time of a save to storage; 0 until a save is measured [s]."""
    copy_s: float = 0.0
    """Time to copy the state into the memory of nodes that stay; 0 until a copy is measured [s]."""
    leave_steps: int = STEPS_TO_LEAVE
    """Steps that a group still completes after a request to leave, including the step during which the request arrives: the
    maximum over recent requests."""

    def copied_by(self, lost_s: float, reserve_s: float, now: float) -> float:
        """Return when the copy of the state in other nodes' memory must be complete [s]. If the copy is late, the group saves
        to storage instead, before the node is lost. If there is no time for a copy and then a save, return ``lost_s``: the copy
        may take until the loss.

        Args:
            lost_s: when the node is lost [s].
            reserve_s: minimum time that must be left for the save [s].
            now: when the group is asked to leave [s].

        Examples:
            >>> forecast = RestartForecast(step_s=2.0, save_s=20.0, copy_s=1.0)
            >>> forecast.copied_by(120.0, 5.0, now=60.0), forecast.copied_by(120.0, 5.0, now=90.0)
            (90.0, 120.0)
        """
        by_s = lost_s - max(reserve_s, _MARGIN * self.save_s)
        return by_s if now + self.leave_steps * self.step_s + _MARGIN * self.copy_s <= by_s else lost_s

    def leaving_s(self, reserve_s: float, durable: bool) -> float:
        """Return how long before the loss of a node its group must be asked to leave: the time of its last steps, plus the time
        to copy or save its state [s]. Until a copy has been measured, the time of a save is added, in case the copy is slow.

        Args:
            reserve_s: minimum time to copy or save the state [s].
            durable: whether the state is saved to storage; else it is copied to the memory of other nodes.

        Examples:
            >>> forecast = RestartForecast(step_s=2.0, save_s=20.0, copy_s=1.0)
            >>> forecast.leaving_s(5.0, durable=False), forecast.leaving_s(5.0, durable=True)
            (9.8, 54.8)
        """
        if durable:
            safe_s = max(reserve_s, _SAVES * self.save_s)
        elif self.copy_s:
            safe_s = max(reserve_s, _MARGIN * self.copy_s)
        else:
            safe_s = reserve_s + _MARGIN * self.save_s
        return self.leave_steps * _SLOW_STEP * self.step_s + safe_s


# Choose the save interval: short enough that a loss costs little, and long enough that saving costs little.


class SaveInterval(NamedTuple):
    """A save interval, and why it was chosen."""

    every_s: float
    """Training time between the starts of two saves [s]."""
    reason: str


def mean_time_to_loss(expected_s: float, observed_s: float, losses: int) -> float:
    """Return the estimated mean training time between losses of workers [s]. The estimate starts at ``expected_s``, which has
    the weight of one observed loss, so that the first hours of a run do not decide alone. (This is a Gamma prior of shape 1
    over the rate of a Poisson process.)"""
    return (expected_s + observed_s) / (1 + losses)


LEAST_SAVE_INTERVAL_S, MOST_SAVE_INTERVAL_S = 30.0, 1800.0
"""Bounds of the save interval that ``checkpoint.every_steps = auto`` chooses [s]."""


def young_daly_interval(
    save_s: float, loss_s: float, least_s: float = LEAST_SAVE_INTERVAL_S, most_s: float = MOST_SAVE_INTERVAL_S
) -> SaveInterval:
    """Return the best save interval within [least_s, most_s]. ``save_s``: training time that a save costs [s]; ``loss_s``: mean
    training time between losses [s].

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS, 2006), equation
    37; its first term is J. W. Young's sqrt(2 C M) (CACM, 1974).
    """
    if save_s >= 2 * loss_s:
        best = loss_s
    else:
        ratio = save_s / (2 * loss_s)
        best = math.sqrt(2 * save_s * loss_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
    every = min(max(best, least_s), most_s)
    bound = f", bounded to {every:.0f} s" if every != best else ""
    return SaveInterval(
        every, f"a save costs {save_s:.2f} s, a loss comes every {loss_s / 3600:.2f} h: best {best:.0f} s{bound}"
    )


def snapshot_every(copy_s: float, step_s: float, share: float, now: int = 0) -> int:
    """Return the number of steps between in-memory snapshots, so that snapshots take at most ``share`` of the training time.
    ``copy_s``: training time that a snapshot costs [s]; ``now``: the current number of steps between snapshots, which is kept
    while snapshots take from 1/3 to 1.3 times ``share``, because measurements vary."""
    if now and share / 3 <= copy_s / (now * step_s) <= share * 1.3:
        return now
    return max(1, math.ceil(copy_s / (share * step_s)))
