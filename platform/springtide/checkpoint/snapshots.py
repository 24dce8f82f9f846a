"""Snapshots in the memory of the nodes, so that the loss of a process or a node costs few steps.

Each rank copies its boxes (parts of tensors) to one of two staging buffers in turn. A snapshot store (on Ray: one actor per
node) keeps the buffer's memory alive when the rank is gone, and copies it to a peer on another node. The next snapshot begins
only when the previous snapshot of every rank is held by its store and copied to a peer. So one of the two buffers is always
complete on every rank. A buffer's mark (header) shows whether the copy into it is complete. Digests show whether its bytes are
still those that the rank copied.

A restore requests from each store, once, the list of parts that it holds; there is one part per rank. A snapshot is whole if
the stores hold all its parts. For each part of the newest whole snapshot, one store then sends the table of pieces (boxes):

    rank 0:     parts in all stores -> the newest whole snapshot -> all ranks
    each rank:  pieces of its share of that snapshot's parts -> all ranks -> read the bytes of its own boxes
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from springtide.checkpoint.agreed import agreed_step, counting
from springtide.checkpoint.format import BadFile, Identity, Meta, committed, name_of
from springtide.checkpoint.fresh_start import of_another_order
from springtide.checkpoint.load import PieceSource, read_state
from springtide.checkpoint.piece_table import PieceTable, share
from springtide.checkpoint.restore import Restored
from springtide.checkpoint.shared_memory import GROUP_BYTES, NO_STEP
from springtide.checkpoint.snapshot_parts import Snapshot, SnapshotPart, newest_whole
from springtide.checkpoint.staging import StagingBuffer, StagingPlan, in_thread
from springtide.checkpoint.tensors import box, materialize, named_tensors
from springtide.distributed import gathered, on_first, rank_here
from springtide.storage import Folder

_TRIES = 3
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class SnapshotSource(PieceSource, Protocol):
    """Reads a snapshot: the table of its pieces (tensor boxes), and the bytes of each rank's part. A part is read like a file;
    ``file_of`` returns the file's name."""

    def table(self, parts: Sequence[SnapshotPart]) -> PieceTable:
        """Return the table of the pieces of ``parts``. Raises OSError if a part is lost, BadFile if the table has changed since
        a rank copied its part."""


class SnapshotStore(Protocol):
    """Holds this rank's snapshots, and finds the snapshots of all ranks."""

    def keep(self, snapshot: Snapshot, stage: StagingBuffer, needed_from: int) -> Any:
        """Start to keep the staging buffer's memory alive, and to copy it to a peer node. Returns a handle for ``settled``.
        Snapshots of leases older than ``needed_from`` are no longer needed and are freed first."""

    def settled(self, handle: Any) -> bool:
        """Return True once the snapshot of ``handle`` is held in memory and copied to a peer. Does not wait. Raises OSError if
        holding or copying failed; the caller then takes no snapshots for a while."""

    def hold(self, snapshot: Snapshot, stage: StagingBuffer) -> None:
        """Keep the staging buffer's memory alive, without copies on other nodes. Returns once the store has opened the memory;
        raises OSError if the store fails to do so."""

    def staying(self) -> Sequence[str]:
        """Return the nodes that will not be taken away (preempted, drained) soon; called only on rank 0. Raises OSError if the
        cluster cannot be queried."""

    def evacuate(self, stay: Sequence[str]) -> bool:
        """Place copies only on the nodes ``stay`` from now on. Returns True if later snapshots survive the loss of all other
        nodes."""

    def forget(self, before: int, kept: SnapshotPart | None = None) -> None:
        """Free the snapshots of leases older than ``before``, except the snapshot that ``kept`` is a part of. With ``kept``,
        wait until they are freed."""

    def found(self) -> Sequence[SnapshotPart]:
        """Return the complete snapshot parts in all stores of the run, and where each is held; called only on rank 0."""

    def source(self, parts: Sequence[SnapshotPart]) -> SnapshotSource:
        """Return a source that reads ``parts``, which ``found`` returned on rank 0, from any node. Raises OSError if a part is
        lost."""

    def exclude(self, file: str) -> None:
        """From now on, read snapshot part ``file`` from another node that holds a copy, because the copy that was just read is
        damaged."""


class Snapshotter:
    """Copies one rank's state to the memory of nodes, one snapshot after the other."""

    def __init__(
        self,
        snapshot_store: SnapshotStore,
        term: int,
        rank: int,
        world_size: int,
        stage_in: str,
        is_cut: Callable[[], bool] = lambda: False,
    ) -> None:
        """``is_cut``: returns True if this rank's communication with its worker group was aborted. The snapshot in progress is
        then dropped, because the abort may have left an inconsistent state."""
        self._snapshot_store, self._term, self._rank, self._is_cut = snapshot_store, term, rank, is_cut
        self._layout = StagingPlan(rank, world_size)
        self._stage_in = stage_in
        self._stages: list[StagingBuffer] = []
        self._next = 0
        self._meta: Meta | None = None
        """Metadata of the snapshot that is being copied."""
        self._handle: Any = None
        self._handing_over: Future[None] | None = None
        self._taken = 0
        self._group = secrets.token_bytes(GROUP_BYTES)

    def begin(self, tensors: Mapping[str, Tensor], meta: Meta) -> None:
        """Begin to copy the tensors. They must not change before ``staged`` returns. The previous snapshot must be safe on
        every rank (held in memory and copied to a peer). Raises OSError if there is too little memory."""
        mine, size = self._layout.of(tensors), self._layout.size_bytes
        if not self._stages or self._stages[0].size_bytes < size:
            self.close()
            for _ in range(2):
                self._stages.append(StagingBuffer(self._stage_in, size))
        stage = self._stages[self._next]
        stage.mark(NO_STEP)
        stage.copy(mine, self._layout.pieces)
        self._meta = meta
        # once a snapshot of this lease is safe, snapshots of older leases are no longer needed
        needed_from = self._term if self._taken else 0
        self._handing_over = in_thread("springtide-memory", lambda: self._hand_over(needed_from), daemon=False)

    def staged(self) -> None:
        """Wait until the copy has read the tensors, so that training may change them again."""
        if self._handing_over is not None:
            self._stages[self._next].wait()

    def busy(self) -> bool:
        """Return True if the last snapshot is not yet held in memory and copied to a peer. Does not wait. Raises OSError if it
        failed."""
        if self._handing_over is not None:
            if not self._handing_over.done():
                return True
            if error := self._handing_over.exception():
                raise OSError(f"the state could not be copied: {type(error).__name__}: {error}") from error
            self._handing_over, self._next = None, 1 - self._next
        if self._handle is not None and self._snapshot_store.settled(self._handle):
            self._handle = None
            self._taken += 1
            # the second snapshot began only after the first was safe on every rank: free the snapshots of older leases
            if self._taken == 2 and self._rank == 0:
                store, term = self._snapshot_store, self._term
                in_thread("springtide-forget", lambda: store.forget(term), daemon=True)  # training does not wait
        return self._handle is not None

    def staying(self) -> Sequence[str]:
        """Return the nodes that will not be taken away soon, as ``SnapshotStore.staying`` does."""
        return self._snapshot_store.staying()

    def evacuate(self, stay: Sequence[str]) -> bool:
        """Place copies only on the nodes ``stay``, as ``SnapshotStore.evacuate`` does."""
        return self._snapshot_store.evacuate(stay)

    def _hand_over(self, needed_from: int) -> None:
        stage, meta, pieces = self._stages[self._next], self._meta, self._layout.pieces
        assert meta is not None
        stage.settle()
        if self._is_cut():
            return
        digests, size = stage.digests(pieces), self._layout.size_bytes
        snapshot = Snapshot.of(self._term, self._rank, meta, pieces, size, digests, self._group, self._next)
        stage.mark(snapshot.meta.step, snapshot.group)
        self._handle = self._snapshot_store.keep(snapshot, stage, needed_from)

    def reset(self) -> None:
        """Give up the snapshot in progress and release the staging buffers. A later ``begin`` allocates new ones."""
        self.close()
        self._handing_over, self._handle, self._taken = None, None, 0

    def close(self) -> None:
        """Close this rank's staging buffers. The snapshot store keeps their memory alive for snapshots that it holds."""
        if self._handing_over is not None:
            wait([self._handing_over])
        for stage in self._stages:
            stage.close()
        self._stages = []


def hold_live(
    store: SnapshotStore,
    tensors: Mapping[str, Tensor],
    meta: Meta,
    term: int,
    rank: int,
    survivors: Sequence[int],
    stage_in: str,
) -> None:
    """Copy this rank's part of the state of a lost worker group to memory that ``store`` keeps alive. The group's ``survivors``
    still have the state on their devices (a live copy). If several survivors have the same box (tensor part), only one of them
    stores it. No rank may train meanwhile.

    Args:
        store: the snapshot store of this rank.
        tensors: the whole state, as ``named_tensors`` returns it.
        meta: metadata of the state, as the lost group would have written it.
        term: lease number of the lost group.
        rank: number of this rank in the lost group.
        survivors: numbers of the surviving ranks in the lost group, ascending; all have the state after the same step.
        stage_in: folder of a memory file system.

    Raises:
        OSError: there is too little memory.
    """
    layout = StagingPlan(rank, meta.world_size, set(survivors))
    mine = layout.of(tensors)
    stage = StagingBuffer(stage_in, layout.size_bytes)
    try:
        stage.copy(mine, layout.pieces)
        stage.settle()
        snapshot = Snapshot.of(
            term,
            list(survivors).index(rank),
            meta.model_copy(update={"world_size": len(survivors)}),  # as if the survivors had been the whole group
            layout.pieces,
            layout.size_bytes,
            stage.digests(layout.pieces),
            secrets.token_bytes(GROUP_BYTES),
            slot=2,
            num_survivors=len(survivors),
        )
        stage.mark(meta.step, snapshot.group)
        store.hold(snapshot, stage)
    finally:
        stage.close()


def restore_from_snapshots(
    run: Folder, snapshot_store: SnapshotStore, model: nn.Module, optimizer: torch.optim.Optimizer, identity: Identity
) -> Restored | None:
    """Load the newest complete snapshot (with a part of every rank) from the memory of the nodes; all ranks call it together.
    Returns None if there is no such snapshot, if the run has a newer checkpoint, or if the snapshot cannot be read. Raises
    CheckpointError if the snapshot is of another model."""
    size = len(gathered(None))
    for _ in range(_TRIES):  # a node may be lost during the read, or hold damaged bytes; other nodes have copies
        parts = _newest(run, snapshot_store, identity)
        if not parts:
            return None
        problems = _try_load(snapshot_store, parts, share(parts, rank_here(), size), model, optimizer)
        if not any(problems):  # all ranks have loaded: free all other snapshots, to make room for new ones
            if rank_here() == 0:
                snapshot_store.forget(parts[0].term + 1, kept=parts[0])
            meta = parts[0].meta
            whose = "live copy" if parts[0].num_survivors else "memory"
            return Restored(meta, f"{whose} of step {meta.step}", agreed_step=agreed_step(meta))
        reason = next(filter(None, problems))
        _log.warning("the snapshot of step %d in memory could not be read: %s", parts[0].meta.step, reason)
    return None


def _try_load(
    snapshot_store: SnapshotStore,
    parts: Sequence[SnapshotPart],
    mine: Sequence[SnapshotPart],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> list[str]:
    """Load the state of ``parts``; all ranks call it together. Each rank requests the table of pieces of the parts ``mine`` and
    sends it to all ranks. Returns the problem of each rank, by rank; an empty text for a rank without a problem."""

    def describe() -> tuple[SnapshotSource, PieceTable]:
        source = snapshot_store.source(parts)
        return source, source.table(mine)

    opened, problem = _attempt(snapshot_store, describe)
    told = gathered((problem, opened and opened[1]))
    problems = [one for one, _ in told]
    if opened is None or any(problems):
        return problems
    source, table = opened[0], PieceTable.joined([one for _, one in told if one is not None])
    _, problem = _attempt(snapshot_store, lambda: _fill(source, table, model, optimizer))
    return gathered(problem)


def _attempt(snapshot_store: SnapshotStore, function: Callable[[], _T]) -> tuple[_T | None, str]:
    """Call ``function``. Return (its result, "") or (None, the problem). If a snapshot part is bad, the next try reads it from
    another node."""
    try:
        return function(), ""
    except BadFile as error:
        snapshot_store.exclude(error.file)
        return None, str(error)
    except OSError as error:
        return None, str(error)


def _fill(source: SnapshotSource, table: PieceTable, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load this rank's part of each tensor from the snapshot in ``source``. ``table``: the pieces of all ranks' parts."""
    materialize(optimizer)
    wanted = named_tensors(model, optimizer)
    read_state(source, table.overlapping({name: box(one) for name, one in wanted.items()}), wanted)


def _newest(run: Folder, snapshot_store: SnapshotStore, identity: Identity) -> list[SnapshotPart]:
    """Return the parts of the snapshot to load, the same on every rank; an empty list if there is no snapshot to load."""

    def newest() -> list[SnapshotPart]:
        parts = newest_whole(counting(run, snapshot_store.found()))
        if not parts or name_of(parts[0].meta.step) < max(committed(run)[-1:], default=""):
            return []
        return [] if of_another_order(run, parts[0].meta, identity) else parts

    return on_first(newest)
