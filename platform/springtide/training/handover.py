"""The end of a worker group's training: save the last state, and end the lease (the right to write the run)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from springtide.checkpoint import leases
from springtide.checkpoint.format import committed, name_of
from springtide.config.steps import StepsDone
from springtide.distributed import World, on_first
from springtide.elastic import GroupRequest
from springtide.events import Event, Left
from springtide.training.checkpoint_schedule import CheckpointSchedule
from springtide.training.group_lease import GroupLease
from springtide.training.part import Part, StepResult, Verdict
from springtide.training.snapshot_schedule import SnapshotSchedule
from springtide.training.state import TrainState


class Handover(Part):
    """Saves the last state of a worker group: in memory if the next group can restore it from there, else in the store."""

    def __init__(
        self,
        world: World,
        lease: GroupLease,
        state: TrainState,
        saves: CheckpointSchedule,
        snapshots: SnapshotSchedule,
        time_to_leave_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """``time_to_leave_s``: returns how long the last in-memory snapshot may take [s], as in ``GroupContext``."""
        self._world, self._lease, self._state = world, lease, state
        self._saves, self._snapshots, self._time_to_leave_s = saves, snapshots, time_to_leave_s
        self._evacuates = False

    def receive(self, result: StepResult) -> None:
        self._evacuates = GroupRequest.EVACUATE in result.requests

    def at_end(self, verdict: Verdict) -> Iterator[Event]:
        step = self._state.step
        if verdict is Verdict.LEAVE:
            kept = not self._evacuates and self._snapshots.leave(step, on_first(self._time_to_leave_s))
            if not kept:
                yield from self._saves.finish(step)
            self._end_lease()  # otherwise the next group would count this group as lost
            yield Left(step=step, kept_in="memory" if kept else "store")
        if verdict not in (Verdict.STOP, Verdict.FINISH):
            return
        yield from self._saves.finish(step)
        if verdict is Verdict.FINISH and not on_first(self._is_committed):
            # no checkpoint has the last step. An earlier group was lost after this step, and this group restored the step from
            # memory: save it
            self._saves.last_step = StepsDone(-1)
            yield from self._saves.finish(step)
        self._saves.end()
        self._end_lease()

    def _end_lease(self) -> None:
        if self._world.is_first:
            leases.end(self._lease.run, self._lease.term)

    def _is_committed(self) -> bool:
        return name_of(self._state.step) in committed(self._lease.run)[-1:]
