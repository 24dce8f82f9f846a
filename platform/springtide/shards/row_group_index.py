"""The row groups of a dataset in one binary file next to its manifest. The file is mapped into memory, not parsed, so the
processes of a node share it.

    bytes 0-31        "springtide row groups 1\\n", then zeros
    shard columns     int64: number, size_bytes, group_ends; 16 bytes: digests, signatures
    group columns     int64: row_ends, sample_ids, num_bytes, tokens, end; 16 bytes: digests

Numbers are little-endian. In each column, the splits follow each other, sorted by source name, then by split name. ``row_ends``
start again from 0 in each split. The name of a shard consists of its split and its number: ``train-00003.parquet``. The
manifest records how many shards and row groups each split has, and the size and digest of this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import overload

import numpy as np
from pydantic import Field

from springtide.errors import CorpusError
from springtide.shards.shard_table import Columns, Count, Digest, Record, ShardTable
from springtide.storage import Cache, Folder, digest

ROW_GROUPS = "row_groups.bin"
_MAGIC = b"springtide row groups 1\n".ljust(32, b"\0")
_SHARD_BYTES, _GROUP_BYTES = 3 * 8 + 2 * 16, 5 * 8 + 16
_FETCH_BYTES, _FETCHES = 32 * 2**20, 8
_REMEDY = "restore the file, or prepare the dataset again"


class IndexRecord(Record):
    """Size and digest of the index file ``row_groups.bin``, as the manifest records them."""

    size_bytes: Count
    digest: Digest


class SplitCounts(Record):
    """How many shards and row groups a split has, as the manifest records it."""

    files: int = Field(ge=1, lt=2**40)
    row_groups: int = Field(ge=1, lt=2**40)


class _Names(Sequence[str]):
    """File names of shards. A name is made from the shard's number when the name is accessed."""

    def __init__(self, split: str, numbers: np.ndarray) -> None:
        self._split, self._numbers = split, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        found = self._numbers[place]
        return _Names(self._split, found) if isinstance(place, slice) else f"{self._split}-{int(found):05d}.parquet"


def number_of(split: str, name: str) -> int:
    """Return the number in the name of a shard: 3 for ``train-00003.parquet``. Raises ValueError unless ``name`` is a shard of
    ``split``."""
    number = name.removeprefix(f"{split}-").removesuffix(".parquet")
    if not number.isdecimal() or name != f"{split}-{int(number):05d}.parquet":
        raise ValueError(f"{name} is not a shard of the split {split}")
    return int(number)


def write_index(dataset: Folder, splits: Mapping[tuple[str, str], ShardTable]) -> IndexRecord:
    """Write the index file of ``splits``, (source, split) -> its table of shards. Returns the size and digest of the file."""
    tables = [splits[key] for key in sorted(splits)]
    numbers = [
        np.array([number_of(split, name) for name in splits[source, split].names]) for source, split in sorted(splits)
    ]
    found, groups = [table.columns for table in tables], np.cumsum([0, *(table.num_groups for table in tables)])
    ends = [one.group_ends + begin for one, begin in zip(found, groups[:-1], strict=True)]
    columns = [
        *(np.concatenate(one).astype("<i8") for one in (numbers, [one.size_bytes for one in found], ends)),
        *(np.concatenate([one[place] for one in found]) for place in (1, 2)),
        np.concatenate([one.row_ends for one in found]).astype("<i8"),
        *(np.concatenate([one.offsets[place] for one in found]).astype("<i8") for place in range(4)),
        np.concatenate([one.group_digests for one in found]),
    ]
    parts = [memoryview(_MAGIC), *(column.reshape(-1).view(np.uint8).data for column in columns)]
    dataset.put(ROW_GROUPS, parts)
    state = digest.Running()
    for part in parts:
        state.add(part)
    return IndexRecord(size_bytes=sum(part.nbytes for part in parts), digest=state.end())


def read_index_of(
    dataset: Folder, record: IndexRecord, counts: Mapping[tuple[str, str], SplitCounts], cache: Cache | None
) -> dict[tuple[str, str], ShardTable]:
    """Return (source, split) -> its shards. Raises CorpusError if the index has changed since the dataset was sealed
    (completed).

    Args:
        dataset: folder of the dataset.
        record: size and digest of the index.
        counts: (source, split) -> numbers of shards and row groups.
        cache: this node's cache for files of object storage; without one each process holds the index in its own memory.
    """
    shards, groups = (sum(getattr(one, name) for one in counts.values()) for name in ("files", "row_groups"))
    wanted = len(_MAGIC) + shards * _SHARD_BYTES + groups * _GROUP_BYTES
    if record.size_bytes != wanted:
        problem = f"row_groups.size_bytes = {record.size_bytes}, {shards} shards and {groups} row groups take {wanted}"
        raise CorpusError(f"{dataset.where(ROW_GROUPS)}: {problem}; {_REMEDY}")
    numbers, columns = _parsed(_read(dataset, record, cache), shards, groups)
    found: dict[tuple[str, str], ShardTable] = {}
    shard = group = 0
    for key in sorted(counts):
        mine, here = slice(shard, shard + counts[key].files), slice(group, group + counts[key].row_groups)
        if (numbers[mine] < 0).any():
            raise CorpusError(f"{dataset.where(ROW_GROUPS)}: number = {numbers[mine].min()} of a shard; {_REMEDY}")
        own = Columns(
            columns.size_bytes[mine],
            columns.digests[mine],
            columns.signatures[mine],
            columns.group_ends[mine] - group,
            columns.row_ends[here],
            columns.offsets[:, here],
            columns.group_digests[here],
        )
        found[key] = ShardTable(_Names(key[1], numbers[mine]), own)
        shard, group = mine.stop, here.stop
    return found


def _parsed(data: np.ndarray, shards: int, groups: int) -> tuple[np.ndarray, Columns]:
    """Return the shards' numbers and views of the columns, from the bytes ``data`` of the index, for all splits together."""
    place = len(_MAGIC)

    def column(rows: int, width: int) -> np.ndarray:
        nonlocal place
        found = data[place : place + rows * width]
        place += rows * width
        return found

    def numbers(rows: int) -> np.ndarray:
        return column(rows, 8).view("<i8")

    def digests(rows: int) -> np.ndarray:
        return column(rows, 16).reshape(rows, 16)

    number, size_bytes, ends = (numbers(shards) for _ in range(3))
    sealed, signatures = (digests(shards) for _ in range(2))
    rows, offsets = numbers(groups), column(4 * groups, 8).view("<i8").reshape(4, groups)
    return number, Columns(size_bytes, sealed, signatures, ends, rows, offsets, digests(groups))


def _read(dataset: Folder, record: IndexRecord, cache: Cache | None) -> np.ndarray:
    """Return the bytes of the index, mapped into memory if the file is local or cached. Raises CorpusError if they have changed
    since the dataset was sealed (completed)."""
    where = dataset.where(ROW_GROUPS)
    try:
        size = dataset.size(ROW_GROUPS)
        if size != record.size_bytes:
            raise CorpusError(
                f"{where}: has {size} bytes, manifest.json says row_groups.size_bytes = {record.size_bytes}; {_REMEDY}"
            )
        if dataset.is_local:
            data: np.ndarray = np.memmap(dataset.local_file(ROW_GROUPS), np.uint8, "r", shape=(size,))
        elif cache is None:
            data = np.frombuffer(_fetch(dataset, size), np.uint8)
        else:
            data = _cached(dataset, record, cache)
    except FileNotFoundError:
        raise CorpusError(f"{where}: is missing; {_REMEDY}") from None
    if not _is_sealed(data, record):
        what = f"its bytes changed after sealing; digest expected {record.digest}, found {digest.of_bytes(data.data)}"
        raise CorpusError(f"{where}: {what}; {_REMEDY}")
    if data[: len(_MAGIC)].tobytes() != _MAGIC:
        raise CorpusError(f"{where}: begins with {data[: len(_MAGIC)].tobytes()!r}, not with {_MAGIC!r}; {_REMEDY}")
    return data


def _cached(dataset: Folder, record: IndexRecord, cache: Cache) -> np.ndarray:
    def fetch(_: str) -> bytes | bytearray:
        return _fetch(dataset, record.size_bytes)

    [data] = cache.get([record.digest], fetch)  # type: ignore[arg-type]
    if not _is_sealed(data, record):  # damaged in the cache by a power failure or a bad disk: fetch it again
        cache.drop(record.digest)
        [data] = cache.get([record.digest], fetch)  # type: ignore[arg-type]
    return data


def _is_sealed(data: np.ndarray, record: IndexRecord) -> bool:
    return len(data) == record.size_bytes and digest.of_bytes(data.data) == record.digest


def _fetch(dataset: Folder, size: int) -> bytearray:
    """Return the bytes of the index from object storage; several ranges are read at a time. If the file has become shorter, the
    end is filled with zeros."""
    found = bytearray(size)

    def read(begin: int) -> None:
        data = dataset.read_range(ROW_GROUPS, begin, min(begin + _FETCH_BYTES, size))
        found[begin : begin + len(data)] = data

    with ThreadPoolExecutor(_FETCHES) as threads:
        list(threads.map(read, range(0, size, _FETCH_BYTES)))
    return found
