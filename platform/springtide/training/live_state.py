"""The state that a rank still has when its worker group is lost: that after the last whole step, never one inside a step.

    begin           the group has restored it: the step that it goes on from is offered
    before_update   from now on the weights may change: nothing is offered
    after_step      all has changed, and all that a checkpoint says of it: this step is offered

A group fails where a rank waits for the others, which is before the weights change. So as a rule every survivor has the state
after the last step, and where the model has several copies (DDP, HSDP) a whole copy of it outlives the loss of many nodes,
however their snapshots were placed. The survivors deal it out among themselves, as a snapshot that has a part of each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from springtide.checkpoint.format import Meta
from springtide.checkpoint.snapshots import SnapshotStore, hold_live
from springtide.distributed import World
from springtide.elastic.copies import LiveShard, covers
from springtide.events import Event
from springtide.training.part import DoneStep, Part, Verdict
from springtide.training.state import TrainState


class LiveState(Part):
    """The live state of one rank. The last of its group's parts: the others may still change what a checkpoint
    says."""

    def __init__(
        self,
        state: TrainState,
        world: World,
        described: Callable[[], tuple[int, Meta]],
        store: SnapshotStore | None,
        stage_in: str,
    ) -> None:
        """``described``: returns the term of the lease and the metadata of a checkpoint of the current step. ``store``: None
        keeps nothing."""
        self._state, self._world, self._described = state, world, described
        self._store, self._stage_in = store, stage_in
        self._whole: tuple[int, Meta] | None = None
        """Term and metadata of the last whole step; None while the weights may change."""
        self._updated: torch.cuda.Event | None = None
        """Whether the device has carried out that step's update."""
        self._lock = threading.Lock()

    def offer_restored(self) -> None:
        """Offer the state that the group has restored: what survivors of the last one hold has no copies, and the first step
        may take long. A run that begins has nothing to lose, and no state of its optimizer yet."""
        if self._state.optimizer.state:
            self._offer()

    def before_update(self) -> None:
        """Offer nothing: from now on the weights may change."""
        self._whole = None

    def after_step(self, done: DoneStep) -> Iterator[Event]:
        """Offer the state after this step, unless it is to be rolled back, or the group was lost meanwhile."""
        if done.verdict is not Verdict.ROLL_BACK:
            self._offer()
        return iter(())

    def _offer(self) -> None:
        if self._store is None:
            return
        found, updated = self._described(), None
        if self._world.device.type == "cuda":
            updated = torch.cuda.Event()
            updated.record()
        with self._lock:
            if not self._world.aborted.is_set():
                self._whole, self._updated = found, updated

    def freeze(self) -> None:
        """Accept no later step; called, in any thread, when ``World.aborted`` is set and before anything is aborted. What the
        device is still updating is not whole: an optimizer may wait in a collective, which an abort releases with garbage."""
        with self._lock:
            if self._updated is not None and not self._updated.query():
                self._whole = None

    def offer(self, survivors: Sequence[int]) -> LiveShard | None:
        """Return what this rank still has; None if that is not a whole step, or the ranks that may be left do not have all
        shards. Call it when the training thread has ended."""
        world = self._world
        num_shards = world.size // world.copies
        if self._whole is None or not covers([rank % num_shards for rank in survivors], num_shards):
            return None
        return LiveShard(world.rank, self._whole[1].step, world.rank % num_shards, num_shards)

    def deposit(self, ranks: Sequence[int]) -> None:
        """Have this rank's part of the state held on its node, as one of ``ranks``, which all have the state after the same
        step. Raises OSError if there is no room."""
        assert self._store is not None
        assert self._whole is not None, "only a rank that has offered its state is asked for it"
        term, meta = self._whole
        hold_live(self._store, self._state.tensors(), meta, term, self._world.rank, ranks, self._stage_in)
