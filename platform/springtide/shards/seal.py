"""Documents' token ids -> rows of fixed length -> Parquet shards -> a manifest.

    documents  [a b c <eot>] [d e <eot>] ...              ragged
    stream      a b c <eot> d e <eot> ...                  one line of tokens a split
    rows       [a b c <eot> d] [d e <eot> f g] ...         sequence_length + 1 each, stride sequence_length

A row repeats the last token of the row before as its first input, so every token but the very first is predicted once.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from springtide.config.schema import ShardsConfig
from springtide.shards.manifest import Group, Shard, Split
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


class Sealer:
    """Packs one split and writes its shards as they fill; memory is one shard's rows."""

    def __init__(self, folder: Folder, split: str, config: ShardsConfig, byte_lengths: np.ndarray) -> None:
        """``byte_lengths``: int64 (vocab,), bytes of text an id stands for."""
        self._folder, self._split, self._config, self._byte_lengths = folder, split, config, byte_lengths
        self._pending: list[np.ndarray] = []
        self._num_pending = 0
        self._shards: list[Shard] = []
        self._documents = self._tokens = self._rows = self._bytes = 0

    def add(self, document: np.ndarray) -> None:
        """Append one document's ids, uint32 (tokens,), end-of-text included."""
        self._documents += 1
        self._tokens += len(document)
        self._pending.append(document)
        self._num_pending += len(document)
        shard_rows = self._config.rows_per_group * self._config.groups_per_shard
        while self._num_pending > shard_rows * self._config.sequence_length:
            self._write(shard_rows)

    def finish(self) -> Split:
        """Write what is left; the last tokens that do not fill a row are dropped."""
        rows = (self._num_pending - 1) // self._config.sequence_length
        if rows > 0:
            self._write(rows)
        return Split(
            documents=self._documents,
            tokens=self._tokens,
            num_bytes=self._bytes,
            rows=self._rows,
            shards=tuple(self._shards),
        )

    def _write(self, rows: int) -> None:
        length = self._config.sequence_length
        line = np.concatenate(self._pending)
        starts = np.arange(rows)[:, None] * length
        tokens = line[starts + np.arange(length + 1)].astype(self._config.token_type)
        self._pending = [line[rows * length :]]
        self._num_pending = len(self._pending[0])

        num_bytes = self._byte_lengths[tokens[:, 1:]].sum(axis=1)
        sample_ids = np.arange(self._rows, self._rows + rows, dtype=np.int64)
        name = f"{self._split}-{len(self._shards):05d}.parquet"
        data, groups = self._encode(sample_ids, num_bytes, tokens)
        self._folder.write(name, data)
        self._shards.append(
            Shard(name=name, rows=rows, size_bytes=len(data), digest=digest.of_bytes(data), groups=tuple(groups))
        )
        self._rows += rows
        self._bytes += int(num_bytes.sum())

    def _encode(self, sample_ids: np.ndarray, num_bytes: np.ndarray, tokens: np.ndarray) -> tuple[bytes, list[Group]]:
        buffer, groups = io.BytesIO(), []
        columns = schema(self._config)
        # token ids hardly compress; plain pages decode at memory speed
        with pq.ParquetWriter(
            buffer, columns, compression="none", use_dictionary=False, write_page_checksum=True
        ) as writer:
            for rows in _slices(len(sample_ids), self._config.rows_per_group):
                lists = pa.FixedSizeListArray.from_arrays(pa.array(tokens[rows].reshape(-1)), type=columns[2].type)
                table = pa.table(
                    [pa.array(sample_ids[rows]), pa.array(num_bytes[rows].astype(np.int32)), lists], schema=columns
                )
                writer.write_table(table, row_group_size=table.num_rows)
                groups.append(Group(rows=table.num_rows, crc32=group_crc32(sample_ids[rows], tokens[rows])))
        return buffer.getvalue(), groups


def _slices(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))
