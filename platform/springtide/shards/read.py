"""Read rows from sealed shards. Before its first row is used, a row group is checked: its digest must be the manifest's, and
its largest id must be in the vocabulary.

local dataset     the shard is mapped                 only the requested rows are copied
object storage    one ranged read per row group, several in parallel -> the node's cache -> mapped
"""

from __future__ import annotations

import functools

import numpy as np

from springtide.errors import CorruptShard
from springtide.shards.loss_mask import ids_of
from springtide.shards.manifest import Manifest
from springtide.shards.ranges import REMEDY, ByteRange, CheckedRanges, OpenGroups, corruption, digest_of
from springtide.shards.shard_table import RowGroupView, Rows, Shard, ShardTable
from springtide.storage import Cache, Folder


class SplitReader:
    """Random access to the rows of one split."""

    def __init__(self, dataset: Folder, manifest: Manifest, split: str, cache: Cache | None = None) -> None:
        """``cache``: this node's disk cache for row groups of object storage; None: they are fetched at each read."""
        self._manifest = manifest
        table = manifest.splits[split].shards
        has_known_ids = np.zeros(len(table.columns.row_ends), dtype=bool)  # uses memory only where it is set to True

        def view(number: int, data: np.ndarray) -> RowGroupView:
            found = RowGroupView(data, table.group(number), manifest.token_type, manifest.memory_type)
            if not has_known_ids[number]:
                if found.exceeds(manifest.vocab_size - 1):
                    raise _foreign_id(dataset, _range(table, number), found, manifest.vocab_size)
                has_known_ids[number] = True
            return found

        ranges = CheckedRanges(dataset, functools.partial(_range, table), cache)
        self._groups = OpenGroups(ranges, table.columns.row_ends, view)

    def read(self, rows: np.ndarray) -> Rows:
        """Return the rows with numbers ``rows``, int64 (n,), in that order. Raises CorruptShard, which names the shard, if
        bytes have changed."""
        found = Rows(
            np.empty(len(rows), dtype=np.int64),
            np.empty(len(rows), dtype=np.int32),
            np.empty((len(rows), self._manifest.sequence_length + 1), dtype=self._manifest.memory_type),
        )
        for group, here, index in self._groups.of(rows):
            for column, stored in zip(found, group.take(index), strict=True):
                column[here] = stored
        return found


def _range(table: ShardTable, number: int) -> ByteRange:
    shard, place = table.shard_of(number)
    group = table.group(number)
    return ByteRange(table.file(shard), group.sample_ids, group.end, group.digest, f"row group {place}")


def _foreign_id(dataset: Folder, one: ByteRange, group: RowGroupView, vocab_size: int) -> CorruptShard:
    """Return the error for a row group with an id that the vocabulary does not have."""
    largest = ids_of(group.take(np.arange(group.rows)).tokens).max()
    problem = f"{one.what}: holds id {largest}, and the vocabulary has {vocab_size} ids"
    return CorruptShard(f"{dataset.where(one.file.name)}: {problem}; {REMEDY}")


def check_shard(dataset: Folder, shard: Shard) -> None:
    """Raise CorruptShard if the file's bytes changed after the dataset was sealed (completed)."""
    try:
        found = digest_of(dataset, shard)
    except (FileNotFoundError, IsADirectoryError) as error:  # other errors may be temporary
        raise CorruptShard(f"{dataset.where(shard.name)}: cannot be read ({error}); {REMEDY}") from error
    if found != shard.digest:
        raise corruption(dataset, shard, "its bytes changed after sealing", found)
