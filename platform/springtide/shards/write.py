"""Write rows of token ids as one Parquet shard, and return its record for the manifest."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from springtide.config.data import ShardsConfig
from springtide.shards.shard_table import RowGroup, RowGroupView, Shard
from springtide.storage import Folder, digest

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
