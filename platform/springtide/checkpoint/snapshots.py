"""Snapshots in the memory of the nodes, so that the loss of a process or a node costs few steps.

Each rank copies its boxes to one of two staging buffers in turn. A snapshot store (on Ray: one actor per node) holds
the memory when the rank is gone, and copies it to a peer on another node. One of the two buffers is always complete on
every rank: the next snapshot begins only when the one before is safe everywhere. A buffer's mark shows whether its copy
is complete, and digests show whether its bytes are still those that the rank copied.

A restore asks each store once which parts it has, and of the newest whole snapshot each part's holder once for its pieces:

    rank 0: parts of all stores -> the newest whole snapshot -> all ranks
    each rank: the pieces of its share of those parts -> all ranks -> the bytes of its own boxes
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
    """The bytes of parts of a snapshot, in files that ``file_of`` names, and their pieces."""

    def table(self, parts: Sequence[SnapshotPart]) -> PieceTable:
        """Return the pieces of some of its parts, as their ranks described them. Raises OSError if some are lost, BadFile if
        what is told of one is not what its rank described."""


class SnapshotStore(Protocol):
    """Holds snapshots for this rank."""

    def keep(self, snapshot: Snapshot, stage: StagingBuffer, needed_from: int) -> Any:
        """Hold the staging buffer's memory, and have it copied to a peer. Returns a handle for ``settled``. Snapshots
        of leases older than ``needed_from`` are no longer needed and are freed first."""

    def settled(self, handle: Any) -> bool:
        """Return whether it is held and copied. Does not wait. Raises OSError if it cannot be: then no more snapshots are
        kept for a while."""

    def hold(self, snapshot: Snapshot, stage: StagingBuffer) -> None:
        """Hold the staging buffer's memory, without copies elsewhere, and wait until that is done. Raises OSError if it cannot
        be."""

    def staying(self) -> Sequence[str]:
        """Return the nodes that stay; called on rank 0 alone. Raises OSError if they cannot be found out."""

    def evacuate(self, stay: Sequence[str]) -> bool:
        """From now on, place copies on the nodes that ``stay``. Returns whether later snapshots survive the others."""

    def forget(self, before: int, kept: SnapshotPart | None = None) -> None:
        """Free the snapshots of leases older than ``before``, except the one that ``kept`` is a part of. With ``kept``,
        wait until that is done."""

    def found(self) -> Sequence[SnapshotPart]:
        """Return the complete snapshot parts in all stores of the run, and where each is held; called on rank 0 alone."""

    def source(self, parts: Sequence[SnapshotPart]) -> SnapshotSource:
        """Return a source of ``parts``, on any node, as ``found`` on rank 0 has returned them. Raises OSError if some are
        lost."""

    def exclude(self, file: str) -> None:
        """Read ``file`` elsewhere from now on: its pieces or bytes are not those of its rank."""


class Snapshotter:
    """Snapshots of one rank."""

    def __init__(
        self,
        snapshot_store: SnapshotStore,
        term: int,
        rank: int,
        world_size: int,
        stage_in: str,
        is_cut: Callable[[], bool] = lambda: False,
    ) -> None:
        """``is_cut``: whether this rank was cut off from its worker group; an abort may have left an inconsistent state."""
        self._snapshot_store, self._term, self._rank, self._is_cut = snapshot_store, term, rank, is_cut
        self._layout = StagingPlan(rank, world_size)
        self._stage_in = stage_in
        self._stages: list[StagingBuffer] = []
        self._next = 0
        self._meta: Meta | None = None
        """What the snapshot under way says of itself."""
        self._handle: Any = None
        self._handing_over: Future[None] | None = None
        self._taken = 0
        self._group = secrets.token_bytes(GROUP_BYTES)

    def begin(self, tensors: Mapping[str, Tensor], meta: Meta) -> None:
        """Begin to copy. The tensors may not change before ``staged`` returns. The previous snapshot must be safe on
        every rank. Raises OSError if there is too little memory."""
        mine, size = self._layout.of(tensors), self._layout.size_bytes
        if not self._stages or self._stages[0].size_bytes < size:
            self.close()
            for _ in range(2):
                self._stages.append(StagingBuffer(self._stage_in, size))
        stage = self._stages[self._next]
        stage.mark(NO_STEP)
        stage.copy(mine, self._layout.pieces)
        self._meta = meta
        needed_from = self._term if self._taken else 0  # a snapshot of this lease is safe on every rank
        self._handing_over = in_thread("springtide-memory", lambda: self._hand_over(needed_from), daemon=False)

    def staged(self) -> None:
        """Wait until the tensors may change."""
        if self._handing_over is not None:
            self._stages[self._next].wait()

    def busy(self) -> bool:
        """Return whether the last snapshot is not safe yet. Does not wait. Raises OSError if it cannot be kept."""
        if self._handing_over is not None:
            if not self._handing_over.done():
                return True
            if error := self._handing_over.exception():
                raise OSError(f"the state could not be copied: {type(error).__name__}: {error}") from error
            self._handing_over, self._next = None, 1 - self._next
        if self._handle is not None and self._snapshot_store.settled(self._handle):
            self._handle = None
            self._taken += 1
            if self._taken == 2 and self._rank == 0:  # the one before is of this lease, and safe on every rank
                store, term = self._snapshot_store, self._term
                in_thread("springtide-forget", lambda: store.forget(term), daemon=True)  # no step waits for all nodes
        return self._handle is not None

    def staying(self) -> Sequence[str]:
        """As ``SnapshotStore.staying``."""
        return self._snapshot_store.staying()

    def evacuate(self, stay: Sequence[str]) -> bool:
        """As ``SnapshotStore.evacuate``."""
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
        """Give up the snapshot under way and release the memory, so that a later ``begin`` starts anew."""
        self.close()
        self._handing_over, self._handle, self._taken = None, None, 0

    def close(self) -> None:
        """Release the memory; the snapshot store still holds it."""
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
    """Have ``store`` hold this rank's part of a state that the ``survivors`` of a lost group have together, each a part of it:
    of those with the same box one has it. No rank may train. Raises OSError if there is too little memory.

    Args:
        store: the store of this rank.
        tensors: the whole state, as ``named_tensors`` returns it.
        meta: of the step that it is of, as the lost group would have written it.
        term: the lost group's.
        rank: this rank, in the lost group.
        survivors: ranks in the lost group, ascending; all have the state after the same step.
        stage_in: folder of a memory file system.
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
            meta.model_copy(update={"world_size": len(survivors)}),  # as if they had been the whole group
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
    """Load the newest snapshot of which every part survives; all ranks call it together. Returns None if there is none,
    if the run has a newer checkpoint, or if it cannot be read. Raises CheckpointError if it is of another model."""
    size = len(gathered(None))
    for _ in range(_TRIES):  # a node may be lost during the read, or have other bytes; others have copies
        parts = _newest(run, snapshot_store, identity)
        if not parts:
            return None
        problems = _try_load(snapshot_store, parts, share(parts, rank_here(), size), model, optimizer)
        if not any(problems):  # all have it: free the others, to have room for new ones
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
    """Load the state of ``parts``; all ranks call it together, and each asks for the pieces of the parts that are ``mine``.
    Returns the problem of each rank, empty without one."""

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
    """Return what ``function`` returns, and why it cannot, empty if it can. What is bad is read elsewhere from now on."""
    try:
        return function(), ""
    except BadFile as error:
        snapshot_store.exclude(error.file)
        return None, str(error)
    except OSError as error:
        return None, str(error)


def _fill(source: SnapshotSource, table: PieceTable, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load this rank's boxes; ``table``: the pieces of all parts."""
    materialize(optimizer)
    wanted = named_tensors(model, optimizer)
    read_state(source, table.overlapping({name: box(one) for name, one in wanted.items()}), wanted)


def _newest(run: Folder, snapshot_store: SnapshotStore, identity: Identity) -> list[SnapshotPart]:
    """Return the parts to load, the same on every rank."""

    def newest() -> list[SnapshotPart]:
        parts = newest_whole(counting(run, snapshot_store.found()))
        if not parts or name_of(parts[0].meta.step) < max(committed(run)[-1:], default=""):
            return []
        return [] if of_another_order(run, parts[0].meta, identity) else parts

    return on_first(newest)
