"""The schedule of in-memory snapshots: as often as possible, at a cost of at most a fixed share of training time."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator

from springtide.checkpoint.restore import Restored
from springtide.checkpoint.snapshots import Snapshotter
from springtide.config.schema import CheckpointConfig
from springtide.config.steps import StepsDone, one_more
from springtide.distributed import gathered, on_first
from springtide.elastic import GroupRequest, snapshot_every
from springtide.elastic.patience import ban_s
from springtide.events import Event, SnapshotIntervalChanged
from springtide.training.checkpoint_schedule import State
from springtide.training.message import StepMessage
from springtide.training.part import DoneStep, Part, Share

_KEEPING, _TURNED_OFF, _DUE = "snapshot under way", "snapshots turned off", "snapshot due"
_SHARE = 0.03
"""Largest share of training time that snapshots may cost if their interval is ``auto`` [ratio]."""
_REMEMBERED = 9
_LOOK_S = 0.005


class SnapshotSchedule(Part):
    """The snapshots of one rank. Rank 0 decides when to take a snapshot, and the other ranks receive the decision in the step's
    all-reduce."""

    def __init__(
        self, config: CheckpointConfig, memory: Callable[[], Snapshotter | None], state: State, is_first: bool
    ) -> None:
        """``memory`` returns the object that takes snapshots until the next restore; None if no snapshots are taken. ``state``
        returns the tensors and the metadata of a snapshot."""
        self._config, self._open_memory, self._state, self._is_first = config, memory, state, is_first

    def begin(self, found: Restored | None) -> None:
        self._memory = self._open_memory()
        self._last = found.meta.step if found else StepsDone(0)
        self._every = self._config.memory_every if self._config.memory_every != "auto" else 1
        self._costs_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._steps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._stall_s: float | None = None
        self._problem = ""
        """Reason why this rank cannot keep a snapshot, until all ranks have received the reason; else empty."""
        self._is_off = False
        """True if all ranks have stopped taking snapshots, because some rank could not keep one."""
        self._again_at_s = 0.0
        """After a stop of snapshots, the time at which ranks try a snapshot again, by ``time.monotonic`` of rank 0 [s]."""
        self._stops = 0
        """How often snapshots were stopped since all ranks last kept one."""
        self._is_urgent = False
        """True if a snapshot is due regardless of the interval, because nodes that may hold copies of the last snapshot will
        leave."""
        self._comes_back = False
        """True if the snapshot in progress is the first one after snapshots were stopped."""

    def must_not_begin(self) -> bool:
        """Return True if this rank's last snapshot is not safe (stored and copied) yet, or this rank cannot keep snapshots. If
        any rank returns True, no rank begins another snapshot. May turn snapshots off on this rank."""
        if self._memory is None or self._problem:
            return True
        try:
            return self._memory.busy()
        except OSError as error:
            self._turn_off(error)
            return True

    def contribute(self, message: StepMessage, share: Share) -> None:
        """Add to the step's message whether this rank must not begin a snapshot yet, and whether it cannot keep snapshots. On
        rank 0, add whether a snapshot is due after this step."""
        # call ``must_not_begin`` first: it may set ``_problem``, which is read below
        must_not_begin, step = self.must_not_begin(), one_more(share.work.step)
        every = 1 if self._is_urgent else self._every
        due = bool(self._is_first and self._memory and self._every and step - self._last >= every)
        due &= not self._is_off or time.monotonic() >= self._again_at_s
        message.any(_KEEPING, must_not_begin)
        message.any(_TURNED_OFF, bool(self._problem))
        message.any(_DUE, due)

    def before_update(self) -> None:
        """Wait until a snapshot in progress has copied the weights to its staging buffer, so that the update may change
        them."""
        if self._memory is None or self._stall_s is None:
            return
        begin = time.perf_counter()
        self._memory.staged()
        self._costs_s.append(self._stall_s + time.perf_counter() - begin)
        self._stall_s = None

    def between_steps(self, done: DoneStep) -> Iterator[Event]:
        """Take a snapshot if one is due and the previous one is safe (stored and copied) on all ranks. If the setting of the
        interval is ``auto``, adapt the interval to the measured cost."""
        step, agreed = done.step, done.result.agreed
        self._steps_s.append(done.step_time_s)
        if agreed[_TURNED_OFF]:
            yield self._stop(step)
            return
        if self._comes_back and not agreed[_KEEPING]:
            self._comes_back, self._stops = False, 0
            yield SnapshotIntervalChanged(step=step, every_steps=self._every, reason="they can be kept again")
        if GroupRequest.COPY in done.result.requests:
            self._move_copies()
            self._is_urgent = True
        if self._memory is None or not agreed[_DUE] or agreed[_KEEPING]:
            return
        begin = time.perf_counter()
        self._last = step
        self._comes_back, self._is_off, self._is_urgent = self._is_off or self._comes_back, False, False
        try:
            self._memory.begin(*self._state())
        except OSError as error:
            self._turn_off(error)
            return
        self._stall_s = time.perf_counter() - begin
        if self._is_first and self._config.memory_every == "auto" and len(self._costs_s) == _REMEMBERED:
            cost_s, step_s = statistics.median(self._costs_s), statistics.median(self._steps_s)
            every = snapshot_every(cost_s, step_s, _SHARE, self._every)
            if every != self._every:
                reason = f"one costs {cost_s * 1e3:.1f} ms of a step of {step_s * 1e3:.0f} ms"
                yield SnapshotIntervalChanged(step=step, every_steps=every, reason=reason)
                self._every = every

    def leave(self, step: StepsDone, left_s: float = math.inf) -> bool:
        """Take a snapshot of ``step`` before the group leaves, and wait until the snapshot is safe (stored and copied); all
        ranks call it together. Returns False if some rank fails or is not ready within ``left_s`` [s]. Then the remaining time
        is just enough to save to the store."""
        until_s = time.monotonic() + left_s
        if not all(gathered(self._move_copies())):  # first: place copies on nodes that stay
            return False
        self._settle(until_s)
        # before a new snapshot begins, the last snapshot must be safe (stored and copied) on all ranks
        if not all(gathered(not self._is_late)):
            return False
        assert self._memory is not None
        self._last = step
        try:
            self._memory.begin(*self._state())
            self._memory.staged()
        except OSError as error:
            self._turn_off(error)
        self._settle(until_s)
        return not any(gathered(self._is_late))

    @property
    def _is_late(self) -> bool:
        """True if this rank's last snapshot is not safe (stored and copied) yet, or has failed."""
        return bool(self._problem) or self.must_not_begin()

    def _move_copies(self) -> bool:
        """Place copies of snapshots on nodes that stay; all ranks call it together. Returns whether a snapshot that this rank
        takes now survives the loss of the nodes that leave."""
        if self._memory is None or self._is_off:
            return False
        try:
            stay = on_first(self._memory.staying)  # rank 0 requests the list of nodes that stay, for all ranks
            return not self._problem and self._memory.evacuate(stay)
        except OSError as error:
            self._turn_off(error)
            return False

    def _stop(self, step: StepsDone) -> SnapshotIntervalChanged:
        """Stop snapshots for a while, because some rank cannot keep them; all ranks call it together. They exchange the reasons
        and release the memory of snapshots. Each stop in a row lasts longer. Returns the event that reports the stop."""
        assert self._memory is not None, "only ranks that take snapshots stop together"
        problems = {rank: problem for rank, problem in enumerate(gathered(self._problem)) if problem}
        self._memory.reset()
        self._problem, self._stall_s, self._comes_back, self._is_off = "", None, False, True
        self._stops += 1
        pause_s = ban_s(self._stops)
        self._again_at_s = time.monotonic() + pause_s
        rank, problem = min(problems.items())
        more = f" (and {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
        reason = f"rank {rank}{more}: {problem}; tried again in {pause_s:.0f} s"
        return SnapshotIntervalChanged(step=step, every_steps=0, reason=reason)

    def _settle(self, until_s: float) -> None:
        """Wait until this rank's last snapshot is safe (stored and copied) or has failed, but not beyond ``until_s`` of
        ``time.monotonic``."""
        while self._memory is not None and not self._problem and self.must_not_begin() and time.monotonic() < until_s:
            time.sleep(_LOOK_S)  # this costs no time: training waits for the snapshot anyway

    def close(self) -> None:
        """Close this rank's staging buffers. The store's snapshots stay valid, because the store keeps their memory."""
        if self._memory is not None:
            self._memory.close()

    def _turn_off(self, error: OSError) -> None:
        assert self._memory is not None, "only a rank that takes snapshots has trouble with them"
        self._memory.reset()
        self._problem = str(error) or type(error).__name__
