"""Rows out of sealed shards, each row group checked against the manifest as it is read."""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from springtide.errors import CorruptShard
from springtide.shards.manifest import Shard, Split
from springtide.shards.seal import group_crc32
from springtide.store import Folder, digest

_GROUPS_KEPT = 64


class Rows(NamedTuple):
    """Rows in the order they were asked for."""

    sample_ids: np.ndarray
    """int64 (rows,), as stored beside the tokens."""
    tokens: np.ndarray
    """uint16 or uint32 (rows, sequence_length + 1)."""
    num_bytes: np.ndarray
    """int32 (rows,)."""


class SplitReader:
    """Random access to the rows of one split. Keeps the row groups it read last, and no open files."""

    def __init__(self, dataset: Folder, split: Split) -> None:
        self._dataset, self._split = dataset, split
        self._places = [(shard, index) for shard in split.shards for index in range(len(shard.groups))]
        self._ends = np.cumsum(split.group_rows()).tolist()
        self._group = functools.lru_cache(maxsize=_GROUPS_KEPT)(self._read_group)

    def read(self, rows: np.ndarray) -> Rows:
        """The rows numbered ``rows``, int64 (n,), in that order; CorruptShard names a shard whose bytes changed."""
        found = [self._locate(int(row)) for row in rows]
        parts = [(self._group(group), index) for group, index in found]
        return Rows(
            np.array([part.sample_ids[index] for part, index in parts], dtype=np.int64),
            np.stack([part.tokens[index] for part, index in parts]),
            np.array([part.num_bytes[index] for part, index in parts], dtype=np.int32),
        )

    def _locate(self, row: int) -> tuple[int, int]:
        group = bisect.bisect_right(self._ends, row)
        return group, row - (self._ends[group - 1] if group else 0)

    def _read_group(self, group: int) -> Rows:
        shard, index = self._places[group]
        try:
            with self._dataset.open(shard.name) as file:
                table = pq.ParquetFile(file, page_checksum_verification=True).read_row_group(index)
            rows = _rows(table)
        except (OSError, pa.ArrowException) as error:
            raise corruption(self._dataset, shard, str(error)) from error
        if group_crc32(rows.sample_ids, rows.tokens) != shard.groups[index].crc32:
            raise corruption(self._dataset, shard, f"row group {index} does not match its checksum")
        return rows


def _rows(table: pa.Table) -> Rows:
    tokens = table["tokens"].combine_chunks()
    length = tokens.type.list_size
    return Rows(
        table["sample_id"].to_numpy(),
        tokens.flatten().to_numpy().reshape(-1, length),
        table["num_bytes"].to_numpy(),
    )


def check_shard(dataset: Folder, shard: Shard) -> None:
    """CorruptShard unless the file's bytes are those that were sealed."""
    try:
        with dataset.open(shard.name) as file:
            found = digest.of_file(file)
    except OSError as error:
        raise CorruptShard(f"{dataset.where(shard.name)}: cannot be read ({error}); {_REMEDY}") from error
    if found != shard.digest:
        raise corruption(dataset, shard, "its bytes changed after sealing", found)


def corruption(dataset: Folder, shard: Shard, what: str, found: str = "") -> CorruptShard:
    """The error for a bad shard, with the digest expected and the digest found."""
    if not found:
        try:
            with dataset.open(shard.name) as file:
                found = digest.of_file(file)
        except OSError as error:
            found = f"nothing ({error})"
    path = dataset.where(shard.name)
    return CorruptShard(f"{path}: {what}; digest expected {shard.digest}, found {found}; {_REMEDY}")


_REMEDY = "remove the dataset's folder and run `springtide prepare` again, or restore the file"
