"""Parts of snapshots in the memory of nodes, as a rank, or a survivor of a lost group, describes its own. No torch here.

    Snapshot        what a rank tells its server: with the table of its pieces and their digests
    SnapshotPart    what servers tell in a look-up: without it, but with the digest of the table

A look-up asks which snapshot is whole, and hears of parts; the pieces of the one that is chosen are told then, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Self, TypeVar

from springtide.checkpoint.format import BadFile, Meta, Piece, StagedPiece
from springtide.checkpoint.piece_table import PieceTable
from springtide.checkpoint.shared_memory import GROUP_BYTES, HeldAt, mark


class SnapshotKey(NamedTuple):
    """Identity of a rank's part of a snapshot."""

    term: int
    step: int
    rank: int
    num_survivors: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotPart:
    """One rank's part of a snapshot, as a look-up finds it."""

    term: int
    rank: int
    meta: Meta
    size_bytes: int
    table_digest: str
    """Digest of the table of its pieces, which its rank made: another table is never taken for it."""
    group: bytes = bytes(GROUP_BYTES)
    """A random id of the worker group, which its memory is marked with: other memory is never taken for it."""
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

    def check(self, table: PieceTable) -> None:
        """Raise BadFile if ``table`` is not that of its pieces."""
        if (found := table.digest) != self.table_digest:
            file = file_of(self.key)
            raise BadFile(f"{file}: digest of its pieces expected {self.table_digest}, found {found}", file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot(SnapshotPart):
    """One rank's part of a snapshot, as described to its snapshot store."""

    table: PieceTable = dataclasses.field(compare=False)
    """Its pieces, in the file that ``file_of`` names; the digest stands for it."""
    slot: int = 0
    """Which of the rank's two staging buffers has it; the one after them for a part of survivors."""

    @classmethod
    def of(
        cls,
        term: int,
        rank: int,
        meta: Meta,
        pieces: Sequence[StagedPiece],
        size_bytes: int,
        digests: Sequence[tuple[str, ...]] = (),
        group: bytes = bytes(GROUP_BYTES),
        slot: int = 0,
        num_survivors: int = 0,
    ) -> Self:
        """Return the part of a rank. ``digests``: of the blocks of each piece, as in ``Piece``."""
        file = file_of(SnapshotKey(term, meta.step, rank, num_survivors))
        table = PieceTable.of(
            [
                Piece(*staged[:5], file, staged.begin, staged.size_bytes, of_blocks)
                for staged, of_blocks in zip(pieces, digests, strict=True)
            ]
        )
        return cls(
            term=term,
            rank=rank,
            meta=meta,
            size_bytes=size_bytes,
            table_digest=table.digest,
            group=group,
            num_survivors=num_survivors,
            table=table,
            slot=slot,
        )

    @property
    def part(self) -> SnapshotPart:
        """What is told of it in a look-up."""
        told = {field.name: getattr(self, field.name) for field in dataclasses.fields(SnapshotPart)}
        return SnapshotPart(**told)

    @property
    def pieces(self) -> list[Piece]:
        """Its pieces."""
        return self.table.pieces()


AnyPart = TypeVar("AnyPart", bound=SnapshotPart)


def newest_whole(found: Sequence[AnyPart]) -> list[AnyPart]:
    """Return the parts of the newest snapshot that has a part of every rank, by rank; an empty list if none has. Of the same
    step, one of a whole group comes before one of survivors: it has copies."""
    by_step: dict[tuple[int, int, int], dict[int, AnyPart]] = {}
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
