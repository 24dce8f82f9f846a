"""Decide when to save checkpoints, and yield events about the saves. All ranks decide from the sums of the step's all-reduce,
so they decide the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.async_saver import AsyncSaver, SaveOutcome
from springtide.checkpoint.format import Meta
from springtide.checkpoint.restore import Restored
from springtide.checkpoint.retention import Rule
from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.distributed import World, gathered
from springtide.elastic import ASSUMED_LOSS_S, GroupRequest, SaveInterval, mean_time_to_loss, young_daly_interval
from springtide.elastic.forecast import LEAST_SAVE_INTERVAL_S, MOST_SAVE_INTERVAL_S
from springtide.errors import CheckpointError, DiskFull, SpringtideError, StoreUnavailable
from springtide.events import Event, Saved, SaveFailed, SaveIntervalChanged, SaveSkipped
from springtide.storage import Folder
from springtide.storage.errors import is_full, may_pass
from springtide.training.group_lease import GroupLease
from springtide.training.message import StepMessage
from springtide.training.part import DoneStep, Part, Share, Verdict, Work
from springtide.training.requests import Requests

State = Callable[[], tuple[Mapping[str, Tensor], Meta]]
_SAVING, _FAILED = "saving", "save failed"
_TOLD_AGAIN = 0.2
"""Smallest relative change of the save interval that is reported [ratio]."""
_LOOK_S = 0.05
_AWAY_S = 1800.0
"""How long training continues while saves fail because the checkpoint store is unreachable [s]."""
_LONGEST_SAVE_S = 3600.0
"""How long the loop sends heartbeats while it waits for a save [s]. A longer wait may be treated as a hang."""


class CheckpointSchedule(Part):
    """Decides when one worker group saves a checkpoint, and handles the outcomes of saves."""

    def __init__(
        self,
        config: Config,
        world: World,
        run: Folder,
        lease: GroupLease,
        requests: Requests,
        state: State,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        """``requests`` receives a SAVE request when the save interval has passed. ``state`` returns the tensors and metadata to
        save. ``heartbeat`` is called while the loop waits for a save."""
        self._heartbeat, self._run, self._lease, self._requests = heartbeat, run, lease, requests
        self._config, self._checkpoint, self._world, self._state = config, config.checkpoint, world, state

    def begin(self, found: Restored | None) -> None:
        checkpoint, lease, world = self._checkpoint, self._lease, self._world
        self._num_lost = leases.losses(self._run) if world.is_first else 0
        """Number of worker groups that this run has lost so far; known on rank 0 alone."""
        self._saver = AsyncSaver(
            self._run,
            lease.term,
            world.rank,
            world.size,
            stage_in=checkpoint.stage,
            tries=checkpoint.tries,
            rule=Rule.of(checkpoint),
            owner=lease.owner,
        )
        if checkpoint.stage:
            self._saver.start()
        self._failed: BaseException | None = None
        """Error of this rank's failed save, until all ranks have received it; else None."""
        self._given_up = False
        """True if all ranks treat the newest save as failed. If the writing process reports an outcome later, it is ignored."""
        self._failed_in_a_row, self._failing_since_s = 0, 0.0
        self._began = 0.0
        self._stall_s = 0.0
        self._duration_s = 0.0
        self._cadence: SaveInterval | None = None
        self._trained_s = 0.0
        self._waited_since = math.inf
        self._nats = 0.0, 0
        """Sum of the finite losses since the last save, and their number."""
        self.last_step = found.meta.step if found else StepsDone(0)
        """Step of the newest save that was started; before the first save, the step of the restored state."""

    def close(self) -> None:
        self._saver.close()

    def end(self) -> None:
        """End the process that writes checkpoints. Call it after the last save."""
        self._saver.end()

    @property
    def busy(self) -> bool:
        return self._saver.busy

    def before_update(self) -> None:
        """Wait until a save in progress has copied the weights, so that the update may change them."""
        begin = time.perf_counter()
        self._saver.staged()
        self._stall_s += time.perf_counter() - begin

    def before_step(self, work: Work) -> None:
        """Request a save if ``checkpoint.every_steps`` is ``auto`` and the save interval has passed."""
        if self._waited_since == math.inf:  # measure from the first step, not from the evaluation before it
            self._waited_since = time.monotonic()
        if self._asks():
            self._requests.ask(GroupRequest.SAVE)

    def contribute(self, message: StepMessage, share: Share) -> None:
        """Add to the step's message whether this rank's save is in progress, and whether it has failed."""
        message.any(_SAVING, self.busy)
        message.any(_FAILED, self._failed is not None)

    def after_step(self, done: DoneStep) -> Iterator[Event]:
        total, number = (0.0, 0) if self.last_step == done.step - 1 else self._nats
        is_finite = math.isfinite(done.result.loss)
        self._nats = (total + done.result.loss, number + 1) if is_finite else (total, number)
        return iter(())

    def describe(self, meta: Meta) -> Meta:
        """Add the mean training loss since the last save to a checkpoint's metadata."""
        total, number = self._nats
        return meta.adding({}, {"loss": total / number}) if number else meta

    def _asks(self) -> bool:
        """Return True on rank 0 if ``checkpoint.every_steps`` is ``auto`` and a save is due. The other ranks receive the
        request in the step's all-reduce."""
        if self._checkpoint.every_steps != "auto" or not self._world.is_first or self._saver.busy:
            return False
        every = self._cadence.every_s if self._cadence else LEAST_SAVE_INTERVAL_S
        return time.monotonic() - self._waited_since >= every

    def between_steps(self, done: DoneStep) -> Iterator[Event]:
        """Yield the outcome of a save that has ended since the last step. Start a new save if one is due or requested."""
        step, result = done.step, done.result
        self._trained_s += done.step_time_s
        yield from self._hear(self._saver.poll())
        if result.agreed[_FAILED]:
            yield from self._give_up(trains_on=True)
        every = self._checkpoint.every_steps
        due = every != "auto" and every > 0 and step % every == 0
        asked = GroupRequest.SAVE in result.requests
        if not (due or asked) or step == self.last_step:
            return
        if result.agreed[_SAVING]:
            if self._checkpoint.when_busy == "skip" and not asked:  # never skip a requested save: its requester waits
                yield SaveSkipped(step=step, reason=f"the save of step {self.last_step} is still being written")
                return
            yield from self.settle(trains_on=True)
        self._begin(step)

    def at_end(self, verdict: Verdict) -> Iterator[Event]:
        """Wait for the save in progress if training ends for a rollback. If training ends for another reason, the part
        ``Handover`` does the last save."""
        if verdict is Verdict.ROLL_BACK:
            yield from self.settle()

    def finish(self, step: StepsDone) -> Iterator[Event]:
        """Save ``step`` and wait until it is committed, with retries. After too many failed saves in a row, raises
        StoreUnavailable if the cause may be temporary, else CheckpointError. Raises DiskFull at once if the disk is full."""
        yield from self.settle()
        if step == self.last_step and self._failed_in_a_row == 0:
            return
        while True:
            self._begin(step)
            failed = self._failed_in_a_row
            yield from self.settle()
            if self._failed_in_a_row <= failed:
                return

    def _begin(self, step: StepsDone) -> None:
        if not self._given_up:  # no rank has reported a failure of the previous save
            self._failed_in_a_row = 0
        self._given_up = False
        begin = time.perf_counter()
        tensors, meta = self._state()
        self._saver.begin(tensors, meta, configs.redact(self._config).model_dump(mode="json"))
        self.last_step, self._began = step, time.monotonic()
        self._waited_since = self._began
        self._stall_s = time.perf_counter() - begin

    def settle(self, trains_on: bool = False) -> Iterator[Event]:
        """Wait until no save is in progress on any rank; all ranks call it together. If the save fails on one rank, all ranks
        cancel it. ``trains_on``: True if training continues after this save."""
        begin_s = time.monotonic()
        while True:
            if time.monotonic() - begin_s < _LONGEST_SAVE_S:
                self._heartbeat()
            yield from self._hear(self._saver.poll())
            states = gathered((self._saver.busy, self._failed is not None))
            if any(failed for _, failed in states):
                yield from self._give_up(trains_on)
            elif not any(busy for busy, _ in states):
                return
            else:
                time.sleep(_LOOK_S)  # this costs no time: training waits for the save anyway

    def _hear(self, outcome: SaveOutcome | None) -> Iterator[Event]:
        if outcome is None or self._given_up:
            return
        if outcome.written is None:
            self._failed = outcome.error
            return
        self._duration_s = time.monotonic() - self._began
        if self._world.is_first:
            yield Saved(
                step=StepsDone(outcome.step),
                name=outcome.written.name,
                size_bytes=outcome.written.size_bytes,
                written_bytes=outcome.written.written_bytes,
                save_time_s=self._duration_s,
                stall_s=self._stall_s,
            )
            yield from self._cadence_now()

    def _give_up(self, trains_on: bool = False) -> Iterator[Event]:
        """Handle a save that failed on some rank: exchange the errors and cancel the save on all ranks. A SpringtideError of a
        rank is raised at once. Other errors raise only after too many failures in a row. If training has ended, a full disk
        raises at once. If training continues (``trains_on``), an unreachable store raises only after ``_AWAY_S``."""
        if not self._failed_in_a_row:
            self._failing_since_s = time.monotonic()
        errors, failing_s = zip(*gathered((self._failed, time.monotonic() - self._failing_since_s)), strict=True)
        self._failed, self._given_up = None, True
        self._saver.cancel()
        self._failed_in_a_row += 1
        rank, error = next((rank, error) for rank, error in enumerate(errors) if error is not None)
        yield SaveFailed(step=self.last_step, reason=f"rank {rank}: {error}", in_a_row=self._failed_in_a_row)
        if isinstance(error, SpringtideError):
            raise error
        if is_full(error) and not trains_on:
            remedy = "make room, then --resume: committed checkpoints are still there"
            raise DiskFull(f"step {self.last_step} is not saved: rank {rank}: {error}; {remedy}")
        # compare rank 0's time, so that all ranks decide the same
        is_away = trains_on and may_pass(error) and failing_s[0] < _AWAY_S
        if self._failed_in_a_row > self._checkpoint.max_failed and not is_away:
            kind = StoreUnavailable if may_pass(error) and not trains_on else CheckpointError
            raise kind(
                f"{self._failed_in_a_row} saves failed one after the other (checkpoint.max_failed = "
                f"{self._checkpoint.max_failed}), the last with: rank {rank}: {error}; repair the store, then --resume: "
                "committed checkpoints are still there"
            )

    def _cadence_now(self) -> Iterator[Event]:
        config = self._checkpoint
        if config.every_steps != "auto":
            return
        loss_s = mean_time_to_loss(ASSUMED_LOSS_S, self._trained_s, self._num_lost)
        least_s = max(LEAST_SAVE_INTERVAL_S, self._duration_s)
        found = young_daly_interval(self._stall_s, loss_s, least_s, max(MOST_SAVE_INTERVAL_S, least_s))
        before, self._cadence = self._cadence, found
        if before is None or abs(found.every_s - before.every_s) > _TOLD_AGAIN * before.every_s:
            yield SaveIntervalChanged(step=self.last_step, every_s=found.every_s, reason=found.reason)
