"""The shards of a split and their row groups, as columns of numbers. Opening takes the same time for ten row groups and for ten
million. If the columns are views of a mapped file (``row_group_index.py``), they take no memory of the process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, overload

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""BLAKE3-128 in hex. Strictly checked, because a manifest's digests become file names in the cache."""
Count = Annotated[int, Field(ge=0, lt=2**63)]

_DIGEST_BYTES = 16
_AT_ONCE = 2**15
"""Number of row groups that are checked at a time, so that their offsets stay in the CPU's cache."""
_MOST_BYTES = 2**62
"""Largest offset in a file that is accepted, so that the sum of two offsets stays below 2**63."""


class Record(BaseModel):
    """Pydantic base of the parts of a manifest: frozen, rejects unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RowGroup(Record):
    """One Parquet row group and the offsets of its values in the file, so that one ranged read fetches them all."""

    rows: Count
    sample_ids: Count
    """Offset of the sample ids, int64 (rows,), with which the group's values begin [bytes]."""
    num_bytes: Count
    """Offset of the rows' text lengths, int32 (rows,) [bytes]."""
    tokens: Count
    """Offset of the tokens, uint8 (bytes of the token type, rows, sequence_length + 1), lowest byte first [bytes]."""
    end: Count
    """End of the tokens [bytes]."""
    digest: Digest
    """Digest of the bytes from ``sample_ids`` to ``end``."""


class Shard(Record):
    """One Parquet file."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*\.parquet$")
    rows: Count
    size_bytes: Count
    digest: Digest
    """Digest of the file."""
    signatures: Digest | None = None
    """Digest of the file with the signatures of the shard's documents. Signatures serve to find near duplicates in other
    datasets. None if there is no such file."""
    groups: tuple[RowGroup, ...] = Field(min_length=1)


class ShardFile(NamedTuple):
    """Name, size and digest of a shard's file, without its row groups."""

    name: str
    size_bytes: int
    digest: str


class Columns(NamedTuple):
    """Numbers of the shards and of their row groups, as arrays."""

    size_bytes: np.ndarray
    """int64 (shards,): size of each file."""
    digests: np.ndarray
    """uint8 (shards, 16): digest of each file."""
    signatures: np.ndarray
    """uint8 (shards, 16): digest of the file with the signatures of the shard's documents; zeros if there is no such file."""
    group_ends: np.ndarray
    """int64 (shards,): total number of row groups in a shard and all shards before it."""
    row_ends: np.ndarray
    """int64 (row groups,): total number of rows in a row group and all row groups before it."""
    offsets: np.ndarray
    """int64 (4, row groups): ``sample_ids``, ``num_bytes``, ``tokens`` and ``end`` of each row group, as in ``RowGroup``."""
    group_digests: np.ndarray
    """uint8 (row groups, 16): digest of each row group."""


class ShardTable(Sequence[Shard]):
    """The shards of a split, in order. A ``Shard`` is made from the columns when it is accessed."""

    def __init__(self, names: Sequence[str], columns: Columns) -> None:
        """``names``: file name of each shard."""
        self.names, self.columns = names, columns

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> ShardTable:
        """Return a table of ``shards``. Raises ValueError if a shard's number of rows is not the sum over its row groups."""
        for shard in shards:
            if shard.rows != (rows := sum(group.rows for group in shard.groups)):
                raise ValueError(f"{shard.name} has {shard.rows} rows, but its row groups have {rows}")
        groups = [group for shard in shards for group in shard.groups]
        names = ("sample_ids", "num_bytes", "tokens", "end")
        columns = Columns(
            size_bytes=_numbers(shard.size_bytes for shard in shards),
            digests=_bytes(shard.digest for shard in shards),
            signatures=_bytes(shard.signatures or "00" * _DIGEST_BYTES for shard in shards),
            group_ends=np.cumsum(_numbers(len(shard.groups) for shard in shards)),
            row_ends=np.cumsum(_numbers(group.rows for group in groups)),
            offsets=np.stack([_numbers(getattr(group, name) for group in groups) for name in names]),
            group_digests=_bytes(group.digest for group in groups),
        )
        return cls([shard.name for shard in shards], columns)

    @classmethod
    def joined(cls, tables: Sequence[ShardTable]) -> ShardTable:
        """Return the shards of several tables, one after the other."""
        if len(tables) == 1:
            return tables[0]
        found = [table.columns for table in tables]
        groups = np.cumsum([0, *(len(one.row_ends) for one in found)])
        rows = np.cumsum([0, *(one.row_ends[-1] for one in found)])
        columns = Columns(
            size_bytes=np.concatenate([one.size_bytes for one in found]),
            digests=np.concatenate([one.digests for one in found]),
            signatures=np.concatenate([one.signatures for one in found]),
            group_ends=np.concatenate([one.group_ends + begin for one, begin in zip(found, groups[:-1], strict=True)]),
            row_ends=np.concatenate([one.row_ends + begin for one, begin in zip(found, rows[:-1], strict=True)]),
            offsets=np.concatenate([one.offsets for one in found], axis=1),
            group_digests=np.concatenate([one.group_digests for one in found]),
        )
        return cls([name for table in tables for name in table.names], columns)

    def __len__(self) -> int:
        return len(self.columns.size_bytes)

    @overload
    def __getitem__(self, place: int) -> Shard: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Shard]: ...
    def __getitem__(self, place: int | slice) -> Shard | Sequence[Shard]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        number = range(len(self))[place]
        groups = tuple(map(self.group, self._groups_of(number)))
        signatures, file = self.columns.signatures[number].tobytes(), self.file(number)
        return Shard.model_construct(
            **file._asdict(),
            rows=sum(group.rows for group in groups),
            signatures=signatures.hex() if any(signatures) else None,
            groups=groups,
        )

    def __iter__(self) -> Iterator[Shard]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardTable):
            return NotImplemented
        same = all(np.array_equal(mine, theirs) for mine, theirs in zip(self.columns, other.columns, strict=True))
        return same and list(self.names) == list(other.names)

    __hash__ = None  # type: ignore[assignment]

    def file(self, number: int) -> ShardFile:
        """Return name, size and digest of the shard with this number, without its row groups."""
        digest = self.columns.digests[number].tobytes().hex()
        return ShardFile(self.names[number], int(self.columns.size_bytes[number]), digest)

    @property
    def num_groups(self) -> int:
        """Number of row groups in all shards."""
        return len(self.columns.row_ends)

    def group(self, number: int) -> RowGroup:
        """Return the row group with this number, which counts over all shards."""
        rows = self.columns.row_ends[number] - (self.columns.row_ends[number - 1] if number else 0)
        sample_ids, num_bytes, tokens, end = self.columns.offsets[:, number].tolist()
        digest = self.columns.group_digests[number].tobytes().hex()
        return RowGroup.model_construct(
            rows=int(rows), sample_ids=sample_ids, num_bytes=num_bytes, tokens=tokens, end=end, digest=digest
        )

    def shard_of(self, group: int) -> tuple[int, int]:
        """Return the number of the shard that contains a row group, and the group's place in that shard."""
        number = int(np.searchsorted(self.columns.group_ends, group, side="right"))
        return number, group - self._groups_of(number).start

    def group_rows(self) -> np.ndarray:
        """Return the number of rows of each row group, int32 (row groups,); int64 if a number needs it."""
        ends = self.columns.row_ends
        found = np.empty(len(ends), np.int32)
        for begin in range(0, len(ends), _AT_ONCE):
            rows = np.diff(ends[begin : begin + _AT_ONCE], prepend=ends[begin - 1] if begin else 0)
            if rows.max(initial=0) >= 2**31:
                return np.diff(ends, prepend=0)
            found[begin : begin + len(rows)] = rows
        return found

    def check(self, rows: int, row_bytes: int) -> None:
        """Raise ValueError if the numbers in the table contradict each other. ``rows``: total number of rows; ``row_bytes``:
        size of a row's tokens."""
        one = self.columns
        firsts = np.concatenate([[0], one.group_ends[:-1]])
        if not (len(one.row_ends) == one.group_ends[-1] and (one.group_ends > firsts).all()):
            raise ValueError(f"group_ends of {len(self)} shards do not fit the {len(one.row_ends)} row groups")
        if (one.size_bytes < 0).any():
            raise ValueError(f"{self.names[int(np.argmax(one.size_bytes < 0))]} has less than 0 bytes")
        if int(one.row_ends[-1]) != rows:
            raise ValueError(f"has {rows} rows, but its row groups have {int(one.row_ends[-1])}")
        for begin in range(0, len(one.row_ends), _AT_ONCE):
            if not self._fits(begin, begin + _AT_ONCE, row_bytes):
                end = min(begin + _AT_ONCE, len(one.row_ends))
                self._blame(next(at for at in range(begin, end) if not self._fits(at, at + 1, row_bytes)), row_bytes)

    def _fits(self, begin: int, end: int, row_bytes: int) -> bool:
        """Return True if the row groups [begin, end) lie inside their files, with enough space for their rows."""
        ends = self.columns.row_ends[begin:end]
        rows = np.diff(ends, prepend=self.columns.row_ends[begin - 1] if begin else 0)
        offsets = self.columns.offsets[:, begin:end]
        # ``_largest`` reads numbers as uint64, so negative numbers are large and fail; within the limits no sum below overflows
        if _largest(rows) > _MOST_BYTES // max(row_bytes, 12) or max(map(_largest, offsets)) > _MOST_BYTES:
            return False
        sample_ids, num_bytes, tokens, last_byte = offsets
        after_tokens = tokens + rows * row_bytes if rows.any() else tokens
        inside = (sample_ids + 8 * rows <= num_bytes).all() and (num_bytes + 4 * rows <= tokens).all()
        first, last = np.searchsorted(self.columns.group_ends, [begin, begin + len(ends) - 1], side="right").tolist()
        many = np.diff(np.clip(self.columns.group_ends[first : last + 1], begin, begin + len(ends)), prepend=begin)
        sizes = np.repeat(self.columns.size_bytes[first : last + 1], many)
        return bool(inside and (after_tokens == last_byte).all() and (last_byte <= sizes).all())

    def _blame(self, number: int, row_bytes: int) -> None:
        shard, place = self.shard_of(number)
        group = self.group(number)
        values = ", ".join(
            f"{name} = {getattr(group, name)}" for name in ("rows", "sample_ids", "num_bytes", "tokens", "end")
        )
        where = f"{self.names[shard]} has a row group that is not inside the file"
        size = int(self.columns.size_bytes[shard])
        raise ValueError(f"{where}: row group {place}: {values}; rows of {row_bytes} bytes, a file of {size} bytes")

    def _groups_of(self, number: int) -> range:
        ends = self.columns.group_ends
        return range(int(ends[number - 1]) if number else 0, int(ends[number]))


def _largest(numbers: np.ndarray) -> int:
    return int(numbers.view(np.uint64).max())


def _numbers(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def _bytes(digests: Iterable[str]) -> np.ndarray:
    data: Any = b"".join(map(bytes.fromhex, digests))
    return np.frombuffer(data, np.uint8).reshape(-1, _DIGEST_BYTES)


# A view of the rows of a row group in the file's bytes, without Parquet decoding.
#
# Tokens are stored in Parquet's BYTE_STREAM_SPLIT encoding: the lowest byte of every token, then the next byte of every token,
# four such planes in all, because Parquet's smallest integer has 32 bits. Planes that the token type does not need contain
# zeros; they come last and are never read.


class Rows(NamedTuple):
    """Rows of a split."""

    sample_ids: np.ndarray
    """int64 (rows,), as stored with the tokens."""
    num_bytes: np.ndarray
    """int32 (rows,): length of the text that the predicted tokens of a row stand for [bytes]."""
    tokens: np.ndarray
    """uint16 or uint32 (rows, sequence_length + 1); the top bit is the loss mask."""


class RowGroupView:
    """A view of the rows of one row group. ``data`` holds the file's bytes from ``group.sample_ids`` to ``group.end``."""

    def __init__(self, data: memoryview | np.ndarray, group: RowGroup, token_type: str, memory_type: str = "") -> None:
        """``token_type``: type of the stored tokens; ``memory_type``: type of the tokens that ``take`` returns; if empty, the
        type of the stored tokens."""

        def array(begin: int, end: int, kind: str) -> np.ndarray:
            return np.frombuffer(data[begin - group.sample_ids : end - group.sample_ids], dtype=kind)

        self.num_data_bytes, self.rows = group.end - group.sample_ids, group.rows
        self._type = np.dtype(memory_type or token_type)
        self._sample_ids = array(group.sample_ids, group.sample_ids + 8 * group.rows, "<i8")
        self._num_bytes = array(group.num_bytes, group.num_bytes + 4 * group.rows, "<i4")
        self._planes = array(group.tokens, group.end, "u1").reshape(np.dtype(token_type).itemsize, group.rows, -1)

    def take(self, index: np.ndarray) -> Rows:
        """Return n rows of this row group. ``index``: their positions in the group, int64 (n,)."""
        # in numpy, ``take`` of whole rows is faster than indexing, and ``left_shift`` with a dtype widens without an extra copy
        *lower, highest = self._planes
        tokens: np.ndarray = highest.take(index, axis=0)
        for plane in reversed(lower):
            tokens = np.left_shift(tokens, 8, dtype=self._type)
            tokens |= plane.take(index, axis=0)
        return Rows(self._sample_ids.take(index), self._num_bytes.take(index), tokens.astype(self._type, copy=False))

    def exceeds(self, last_id: int) -> bool:
        """Return True if an id of the group is larger than ``last_id``. Reads the highest bytes of the ids first, and lower
        bytes only if the higher ones are equal."""
        *lower, highest = self._planes
        if self._type.itemsize == len(self._planes) and highest.max() > 0x7F:  # the top bit is the loss mask
            highest = highest & 0x7F
        digit = last_id >> 8 * len(lower)
        most = int(highest.max())
        if most != digit:
            return most > digit
        is_equal = highest == digit
        for place in reversed(range(len(lower))):
            digit = last_id >> 8 * place & 0xFF
            if (is_equal & (lower[place] > digit)).any():
                return True
            if place:
                is_equal &= lower[place] == digit
        return False
