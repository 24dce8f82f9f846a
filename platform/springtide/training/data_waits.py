"""How long each rank waits for its batches."""

from __future__ import annotations

from collections.abc import Iterator

from springtide.checkpoint.restore import Restored
from springtide.config.steps import StepsDone
from springtide.distributed import World
from springtide.events import Event, Waited
from springtide.training.checkpoint_schedule import CheckpointSchedule
from springtide.training.message import StepMessage
from springtide.training.part import DoneStep, Part, Share, StepResult, Verdict

_FIELD = "data wait"


class DataWaits(Part):
    """Sums up how long each rank of one worker group waits for batches, and reports the sums when a save has started. In the
    list of parts (features of a step) it must come after ``saves``, the checkpoint schedule, which starts the saves."""

    def __init__(self, world: World, saves: CheckpointSchedule) -> None:
        self._saves, self._step = saves, StepsDone(0)
        self._waits_s = [0.0] * world.size
        """Time that each rank has waited for batches since this worker group began [s]."""

    def begin(self, found: Restored | None) -> None:
        self._step = StepsDone(0)

    def contribute(self, message: StepMessage, share: Share) -> None:
        message.by_rank(_FIELD, share.work.data_wait_s)

    def receive(self, result: StepResult) -> None:
        waits_s = result.agreed[_FIELD]
        self._waits_s = [sum(both) for both in zip(self._waits_s, waits_s, strict=True)]
        result.fields["data_wait_s"] = max(waits_s)

    def after_step(self, done: DoneStep) -> Iterator[Event]:
        self._step = done.step
        return iter(())

    def between_steps(self, done: DoneStep) -> Iterator[Event]:
        yield from self._report()

    def at_end(self, verdict: Verdict) -> Iterator[Event]:
        if verdict in (Verdict.STOP, Verdict.FINISH):
            yield from self._report()

    def _report(self) -> Iterator[Event]:
        if self._step and self._saves.last_step == self._step:
            yield Waited(step=self._step, data_waits_s=[round(wait_s, 3) for wait_s in self._waits_s])
