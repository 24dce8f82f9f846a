"""The state after the last whole step, which each surviving rank still has on its device when its worker group is lost.

A rank offers this state, so that the next worker group can resume from it:

    offer_restored  the group has restored its state: the restored state is offered
    before_update   the weights may change from now on: nothing is offered
    after_step      weights, optimizer and metadata have all changed: the state after this step is offered

The loss of a rank is noticed where other ranks wait for it, and this is before the weights change. So the surviving ranks
usually have the state after the last step. If the model has several copies (DDP, HSDP), a whole copy survives the loss of many
nodes, wherever snapshots were placed. The survivors then store the state together as an in-memory snapshot, each rank a part of
it.
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
    """The state on one rank's device, offered to the next worker group after a loss. Must be the last in the group's list of
    parts (features of a step), because a later part could still change the checkpoint's metadata."""

    def __init__(
        self,
        state: TrainState,
        world: World,
        described: Callable[[], tuple[int, Meta]],
        store: SnapshotStore | None,
        stage_in: str,
    ) -> None:
        """``described``: returns the term (number) of the lease and the metadata of a checkpoint of the current step.
        ``store``: the rank's snapshot store; if None, no state is offered. ``stage_in``: folder for staging, in a memory file
        system."""
        self._state, self._world, self._described = state, world, described
        self._store, self._stage_in = store, stage_in
        self._whole: tuple[int, Meta] | None = None
        """Lease number (term) and checkpoint metadata of the last whole step; None while the weights may change."""
        self._updated: torch.cuda.Event | None = None
        """CUDA event that completes when the device has executed the update of the last whole step; None on a CPU."""
        self._lock = threading.Lock()

    def offer_restored(self) -> None:
        """Offer the restored state to the next worker group. Do so before the first step, because this step may take long, and
        a state that came from surviving ranks has no other copy. At the beginning of a run the optimizer has no state: nothing
        can be lost, and nothing is offered."""
        if self._state.optimizer.state:
            self._offer()

    def before_update(self) -> None:
        """Stop offering the state, because the weights may change from now on."""
        self._whole = None

    def after_step(self, done: DoneStep) -> Iterator[Event]:
        """Offer the state after this step to the worker group that may replace this one. Offer nothing if the step will be
        rolled back, or if this group was lost during the step."""
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
        """Stop offering the state if the device has not finished its update. An optimizer may then wait in a collective, and an
        abort of the collective would put garbage into the weights. May be called from any thread: after ``World.aborted`` is
        set, which stops further offers, and before any communicator is aborted."""
        with self._lock:
            if self._updated is not None and not self._updated.query():
                self._whole = None

    def offer(self, survivors: Sequence[int]) -> LiveShard | None:
        """Return the step and the shard of the state that this rank can still provide. Returns None if this rank has no state
        of a finished step, or if the surviving ranks (``survivors``) together lack a shard. Call it when the training thread
        has ended."""
        world = self._world
        num_shards = world.size // world.copies
        if self._whole is None or not covers([rank % num_shards for rank in survivors], num_shards):
            return None
        return LiveShard(world.rank, self._whole[1].step, world.rank % num_shards, num_shards)

    def deposit(self, ranks: Sequence[int]) -> None:
        """Store this rank's part of the state in the snapshot store of its node. ``ranks``: the surviving ranks. Their states
        are of the same step, and each of them stores a part. Raises OSError if the node has too little memory."""
        assert self._store is not None
        assert self._whole is not None, "only a rank that has offered its state is asked for it"
        term, meta = self._whole
        hold_live(self._store, self._state.tensors(), meta, term, self._world.rank, ranks, self._stage_in)
