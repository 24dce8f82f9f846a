"""Shard files: write rows of token ids as one Parquet file, and read rows back. Before its first row is used, a row group is
checked: its digest must equal the digest in the manifest, and its largest id must be in the vocabulary.

    local dataset     the shard is mapped                 only the requested rows are copied
    object storage    one ranged read per row group, several in parallel -> mapped
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from springtide.config.data import ShardsConfig
from springtide.errors import CorruptShard
from springtide.shards.loss_mask import ids_of
from springtide.shards.manifest import Manifest
from springtide.shards.ranges import REMEDY, ByteRange, CheckedRanges, OpenGroups, corruption, digest_of
from springtide.shards.shard_table import RowGroup, RowGroupView, Rows, Shard, ShardTable
from springtide.storage import Cache, Folder, digest

_TOKENS_PATH = "tokens.list.element"


def schema(config: ShardsConfig) -> pa.Schema:
    """Return the columns of a shard. ``tokens`` is a fixed-size list; ``num_bytes`` is the number of bytes of text that a row's
    predicted tokens stand for."""
    token_type = pa.uint16() if config.token_type == "uint16" else pa.uint32()
    return pa.schema(
        [
            pa.field("sample_id", pa.int64(), nullable=False),
            pa.field("num_bytes", pa.int32(), nullable=False),
            pa.field("tokens", pa.list_(pa.field("item", token_type, nullable=False), config.sequence_length + 1)),
        ]
    )


def write_shard(
    folder: Folder, name: str, config: ShardsConfig, first_row: int, num_bytes: np.ndarray, tokens: np.ndarray
) -> Shard:
    """Write rows [first_row, first_row + n) of a split as file ``name``, and return the shard's record. ``num_bytes``: (n,);
    ``tokens``: (n, sequence_length + 1)."""
    sample_ids = np.arange(first_row, first_row + len(tokens), dtype=np.int64)
    data, groups = _encode(config, sample_ids, num_bytes.astype(np.int32), tokens.astype(config.token_type))
    folder.write(name, data)
    return Shard(name=name, rows=len(tokens), size_bytes=len(data), digest=digest.of_bytes(data), groups=tuple(groups))


def _encode(
    config: ShardsConfig, sample_ids: np.ndarray, num_bytes: np.ndarray, tokens: np.ndarray
) -> tuple[bytes, list[RowGroup]]:
    buffer, columns = io.BytesIO(), schema(config)
    # uncompressed, and one page per column of a row group: a column's values are then one array in the file
    layout = {"compression": "none", "use_dictionary": False, "data_page_size": 2**31 - 1, "write_page_checksum": True}
    with pq.ParquetWriter(buffer, columns, column_encoding={_TOKENS_PATH: "BYTE_STREAM_SPLIT"}, **layout) as writer:
        for rows in _slices(len(sample_ids), config.rows_per_group):
            lists = pa.FixedSizeListArray.from_arrays(pa.array(tokens[rows].reshape(-1)), type=columns[2].type)
            table = pa.table([pa.array(sample_ids[rows]), pa.array(num_bytes[rows]), lists], schema=columns)
            writer.write_table(table, row_group_size=table.num_rows)
    data, footer = buffer.getvalue(), pq.ParquetFile(buffer).metadata
    groups = [_locate(data, footer.row_group(index), tokens) for index in range(footer.num_row_groups)]
    for group, rows in zip(groups, _slices(len(tokens), config.rows_per_group), strict=True):
        view = RowGroupView(memoryview(data)[group.sample_ids : group.end], group, config.token_type)
        found = view.take(np.arange(group.rows))
        same = zip(found, (sample_ids[rows], num_bytes[rows], tokens[rows]), strict=True)
        assert all(np.array_equal(stored, given) for stored, given in same), (
            "pyarrow's page layout is not the expected one"
        )
    return data, groups


def _locate(data: bytes, group: Any, tokens: np.ndarray) -> RowGroup:
    values = group.num_rows * tokens.shape[1]
    # a page ends with its values (Parquet format, "Data pages"), and a column ends with its only page
    columns = [group.column(place) for place in range(3)]
    ends = [column.data_page_offset + column.total_compressed_size for column in columns]
    begin, end = ends[0] - 8 * group.num_rows, ends[2] - (4 - tokens.itemsize) * values
    return RowGroup(
        rows=group.num_rows,
        sample_ids=begin,
        num_bytes=ends[1] - 4 * group.num_rows,
        tokens=ends[2] - 4 * values,
        end=end,
        digest=digest.of_bytes(memoryview(data)[begin:end]),
    )


def _slices(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


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
