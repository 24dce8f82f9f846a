"""Parts of snapshots in the memory of nodes, as a rank, or a survivor of a lost group, describes its own. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from springtide.checkpoint.format import Meta, StagedPiece
from springtide.checkpoint.shared_memory import GROUP_BYTES, HeldAt, mark


class SnapshotKey(NamedTuple):
    """Identity of a rank's part of a snapshot."""

    term: int
    step: int
    rank: int
    num_survivors: int = 0


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One rank's part of a snapshot, as described to its snapshot store."""

    term: int
    rank: int
    meta: Meta
    pieces: tuple[StagedPiece, ...]
    size_bytes: int
    digests: tuple[tuple[str, ...], ...] = ()
    """Digests of the blocks of each piece, as in ``Piece``."""
    group: bytes = bytes(GROUP_BYTES)
    """A random id of the worker group, which its memory is marked with: other memory is never taken for it."""
    slot: int = 0
    """Which of the rank's two staging buffers has it; the one after them for a part of survivors."""
    num_survivors: int = 0
    """Into how many parts the survivors of a lost group have divided it, by rank; 0 for a part of a whole
    group."""
    held_at: tuple[HeldAt, ...] = ()
    """Where it can be read from; known for a snapshot that a snapshot store has found."""

    @property
    def mark(self) -> bytes:
        """The mark of memory that holds it whole."""
        return mark(self.meta.step, self.group)

    @property
    def key(self) -> SnapshotKey:
        """What tells it from all other parts of the run."""
        return SnapshotKey(self.term, self.meta.step, self.rank, self.num_survivors)


def newest_whole(found: Sequence[Snapshot]) -> list[Snapshot]:
    """Return the parts of the newest snapshot that has a part of every rank, by rank; an empty list if none has. Of the same
    step, one of a whole group comes before one of survivors: it has copies."""
    by_step: dict[tuple[int, int, int], dict[int, Snapshot]] = {}
    for snapshot in found:
        age = snapshot.meta.step, snapshot.term, -snapshot.num_survivors
        by_step.setdefault(age, {})[snapshot.rank] = snapshot
    for _, parts in sorted(by_step.items(), reverse=True):
        if sorted(parts) == list(range(parts[min(parts)].meta.world_size)):
            return [parts[rank] for rank in sorted(parts)]
    return []


def file_of(key: SnapshotKey) -> str:
    """Return the name of a snapshot in ``Piece.file``."""
    whole = f"{key.term}-{key.step}-{key.rank}"
    return f"{whole}-of-{key.num_survivors}" if key.num_survivors else whole
