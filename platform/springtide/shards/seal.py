"""Rows of token ids -> one Parquet shard, and the record of it that the manifest keeps."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from springtide.config.data import ShardsConfig
from springtide.shards.manifest import Group, Shard
from springtide.store import Folder, digest


def schema(config: ShardsConfig) -> pa.Schema:
    """Columns of a shard; ``tokens`` is a list of fixed size, ``num_bytes`` the text its predicted tokens stand for."""
    token_type = pa.uint16() if config.token_type == "uint16" else pa.uint32()
    return pa.schema(
        [
            pa.field("sample_id", pa.int64(), nullable=False),
            pa.field("num_bytes", pa.int32(), nullable=False),
            pa.field("tokens", pa.list_(pa.field("item", token_type, nullable=False), config.sequence_length + 1)),
        ]
    )


def group_crc32(sample_ids: np.ndarray, tokens: np.ndarray) -> int:
    """CRC-32 of a row group's content; shapes (rows,) and (rows, sequence_length + 1)."""
    crc = zlib.crc32(np.ascontiguousarray(sample_ids, dtype="<i8").tobytes())
    return zlib.crc32(np.ascontiguousarray(tokens).astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes(), crc)


def seal(
    folder: Folder, name: str, config: ShardsConfig, first_row: int, num_bytes: np.ndarray, tokens: np.ndarray
) -> Shard:
    """Write rows [first_row, first_row + n) of a split as ``name``; ``num_bytes`` (n,), ``tokens`` (n, length + 1)."""
    sample_ids = np.arange(first_row, first_row + len(tokens), dtype=np.int64)
    data, groups = _encode(config, sample_ids, num_bytes.astype(np.int32), tokens.astype(config.token_type))
    folder.write(name, data)
    return Shard(name=name, rows=len(tokens), size_bytes=len(data), digest=digest.of_bytes(data), groups=tuple(groups))


def _encode(
    config: ShardsConfig, sample_ids: np.ndarray, num_bytes: np.ndarray, tokens: np.ndarray
) -> tuple[bytes, list[Group]]:
    buffer, groups = io.BytesIO(), []
    columns = schema(config)
    # token ids hardly compress; plain pages decode at memory speed
    with pq.ParquetWriter(
        buffer, columns, compression="none", use_dictionary=False, write_page_checksum=True
    ) as writer:
        for rows in _slices(len(sample_ids), config.rows_per_group):
            lists = pa.FixedSizeListArray.from_arrays(pa.array(tokens[rows].reshape(-1)), type=columns[2].type)
            table = pa.table([pa.array(sample_ids[rows]), pa.array(num_bytes[rows]), lists], schema=columns)
            writer.write_table(table, row_group_size=table.num_rows)
            groups.append(Group(rows=table.num_rows, crc32=group_crc32(sample_ids[rows], tokens[rows])))
    return buffer.getvalue(), groups


def _slices(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))
