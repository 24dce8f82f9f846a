"""Descriptions of snapshots, which are copies of the training state in the memory of nodes. A snapshot has one part per rank.
If a worker group is lost, its surviving ranks may store a snapshot: one part per survivor.

    Snapshot        sent by a rank to its snapshot server: includes the table of pieces and their digests
    SnapshotPart    returned by snapshot servers in a look-up: only the digest of that table

A look-up requests from all snapshot servers the list of parts that they hold. The lists suffice to find the newest whole
snapshot. The tables of pieces (tensor boxes) are sent afterwards, once, and only for this snapshot. This module does not import
torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Self, TypeVar

from springtide.checkpoint.format import BadFile, Meta, Piece, StagedPiece
from springtide.checkpoint.piece_table import PieceTable
from springtide.checkpoint.shared_memory import GROUP_BYTES, HeldAt, mark


class SnapshotKey(NamedTuple):
    """Identifies a rank's part of a snapshot within a run."""

    term: int
    step: int
    rank: int
    num_survivors: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotPart:
    """One rank's part of a snapshot, as a look-up in the snapshot servers returns it."""

    term: int
    rank: int
    meta: Meta
    size_bytes: int
    table_digest: str
    """Digest of the table of the part's pieces (tensor boxes), computed by the rank that copied them. A reader that receives
    the table compares its digest with this one."""
    group: bytes = bytes(GROUP_BYTES)
    """Random id in the mark (header) of the memory that holds the part. By this id a reader detects that it has opened the
    wrong memory."""
    num_survivors: int = 0
    """Number of surviving ranks of a lost worker group that stored this snapshot together; 0 if a whole worker group stored
    it."""
    held_at: tuple[HeldAt, ...] = ()
    """Nodes and processes from whose memory the part can be read; set by ``SnapshotStore.found``."""

    @property
    def mark(self) -> bytes:
        """The mark (header with step and random id) that the memory begins with once it holds the complete part."""
        return mark(self.meta.step, self.group)

    @property
    def key(self) -> SnapshotKey:
        """Key of the part, unique among all snapshot parts of the run."""
        return SnapshotKey(self.term, self.meta.step, self.rank, self.num_survivors)

    def check(self, table: PieceTable) -> None:
        """Raise BadFile if the digest of ``table`` is not ``table_digest``, which the part's rank has computed."""
        if (found := table.digest) != self.table_digest:
            file = file_of(self.key)
            raise BadFile(f"{file}: digest of its pieces expected {self.table_digest}, found {found}", file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot(SnapshotPart):
    """One rank's part of a snapshot, as the rank describes it to its snapshot store."""

    table: PieceTable = dataclasses.field(compare=False)
    """The part's pieces (tensor boxes); their ``file`` is the name that ``file_of`` returns. Two descriptions are compared by
    ``table_digest``, not by this table."""
    slot: int = 0
    """Number of the rank's staging buffer that holds the part: 0 or 1; 2 for a part copied by a survivor of a lost group."""

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
        """Return the description of a rank's part. ``digests``: for each piece the digests of its blocks, as in ``Piece``."""
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
        """The description of the part without its table of pieces, as a look-up in the snapshot servers returns it."""
        told = {field.name: getattr(self, field.name) for field in dataclasses.fields(SnapshotPart)}
        return SnapshotPart(**told)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces (boxes of tensors) of this rank's part."""
        return self.table.pieces()


AnyPart = TypeVar("AnyPart", bound=SnapshotPart)


def newest_whole(found: Sequence[AnyPart]) -> list[AnyPart]:
    """Return the parts, by rank, of the newest snapshot that has a part of every rank; an empty list if there is none. If a
    whole worker group and its survivors stored snapshots of the same step, the whole group's snapshot is chosen, because it has
    copies on other nodes."""
    by_step: dict[tuple[int, int, int], dict[int, AnyPart]] = {}
    for snapshot in found:
        age = snapshot.meta.step, snapshot.term, -snapshot.num_survivors
        by_step.setdefault(age, {})[snapshot.rank] = snapshot
    for _, parts in sorted(by_step.items(), reverse=True):
        if sorted(parts) == list(range(parts[min(parts)].meta.world_size)):
            return [parts[rank] for rank in sorted(parts)]
    return []


def file_of(key: SnapshotKey) -> str:
    """Return the name of a snapshot part, used as ``Piece.file``: ``3-1200-0`` for lease 3, step 1200, rank 0."""
    whole = f"{key.term}-{key.step}-{key.rank}"
    return f"{whole}-of-{key.num_survivors}" if key.num_survivors else whole
