"""The record batches of an Arrow stream or file, as the datasets library's ``save_to_disk`` writes them, in bounded memory.

pyarrow does not check the offsets in a batch, and those of a hostile file read other memory: see ``checked``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

_MAGIC = b"ARROW1\0\0"
"""Beginning of an Arrow file, which holds a stream, and an index that is not needed here."""
_READ_BYTES = 2**20
MOST_BATCH_BYTES = 512 * 2**20
"""Most bytes of a batch: it is read whole."""
_AS_BINARY = ((pa.string(), pa.binary()), (pa.large_string(), pa.large_binary()), (pa.string_view(), pa.binary_view()))


def read_batches(file: IO[bytes]) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the schema of an Arrow stream or file, and its batches, whose values are not checked.

    Raises:
        pa.ArrowException, OSError: the file is damaged, has a batch that is too large, or columns of dictionaries, or is
            compressed inside.
    """
    source: Any = _Parts(file)
    messages = pa.ipc.MessageReader.open_stream(source)
    first = next(messages, None)
    if first is None or first.type != "schema":  # pyarrow crashes on another message
        raise pa.ArrowInvalid("does not begin with a schema")
    schema = pa.ipc.read_schema(first)
    return schema, (_batch(message, schema) for message in messages)


def _batch(message: pa.Message, schema: pa.Schema) -> pa.RecordBatch:
    if message.type != "record batch":
        raise pa.ArrowInvalid(f"has a message of type {message.type}: write its columns without dictionaries")
    if _is_compressed(message.metadata):  # it may be a thousand times larger in memory
        raise pa.ArrowInvalid("is compressed inside: write it without compression, or as Parquet")
    return pa.ipc.read_record_batch(message, schema)


def checked(column: pa.Array, is_text: bool = True) -> pa.Array:
    """Return a column. ArrowInvalid if it refers to what it does not hold. ``is_text``: return bytes in place of texts, which
    need not be UTF-8."""
    for text, binary in _AS_BINARY if is_text else ():
        if column.type == text:
            column = column.view(binary)
    column.validate(full=True)
    return column


def part_of(batch: pa.RecordBatch, path: list[str]) -> pa.Array:
    """Return a column of a batch, or of a struct in it: ``["a", "b"]`` is b of the struct a."""
    column = batch.column(path[0])
    for name in path[1:]:
        column.validate()
        column = pc.struct_field(column, name)
    return column


class _Parts:
    """A file that is read in parts: a hostile length takes no more memory than the file has bytes."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        beginning = file.read(len(_MAGIC))
        self._before = b"" if beginning == _MAGIC else beginning

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes, fewer at the end."""
        if size > MOST_BATCH_BYTES:
            raise pa.ArrowInvalid(
                f"has a part of {size:,} bytes, more than {MOST_BATCH_BYTES:,}: write smaller batches"
            )
        parts, self._before = [self._before[:size]], self._before[size:]
        left = size - len(parts[0])
        while left > 0 and (part := self._file.read(min(left, _READ_BYTES))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Return whether the buffers of a record batch are compressed: whether its FlatBuffers table has the field ``compression``,
    which pyarrow does not tell."""
    data = metadata.to_pybytes()
    message = struct.unpack_from("<I", data)[0]
    header = _field(data, message, 2)
    batch = header + struct.unpack_from("<I", data, header)[0] if header else 0
    return not batch or _field(data, batch, 3) != 0


def _field(data: bytes, table: int, number: int) -> int:
    """Return the place of a field of a FlatBuffers table, 0 if it is not there."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, fields)[0]
    place = struct.unpack_from("<H", data, fields + 4 + 2 * number)[0] if 4 + 2 * number < size else 0
    return table + place if place else 0
