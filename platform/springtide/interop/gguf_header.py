"""Headers of GGUF files: what llama.cpp and its relatives read of a model before its weights. Pure.

    magic, version, counts | metadata: key, type, value | tensors: name, sizes, type, offset | padding | data, each padded

Format: version 3 of github.com/ggml-org/ggml/blob/master/docs/gguf.md, little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

ALIGNMENT = 32
"""Tensors begin at multiples of this [bytes]; what readers assume where a file does not say it."""
BLOCK = 32
"""Numbers of a Q8_0 block, which share a scale [numbers]."""
TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q8_0": (8, BLOCK, 2 + BLOCK), "BF16": (30, 1, 2)}
"""Name -> id, numbers of a block, bytes of a block."""
_MAGIC, _VERSION = b"GGUF", 3
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9

Value = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[str]
"""A value of the metadata; an int has 32 bits, with a sign only in a sequence, as llama.cpp has it; an empty sequence is one
of strings."""


class GgufTensor(NamedTuple):
    """A tensor to be written."""

    name: str
    type: str
    """A key of TYPES."""
    shape: tuple[int, ...]
    """As in torch: rows first."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        _, numbers, size_bytes = TYPES[self.type]
        return math.prod(self.shape[1:] or self.shape) // numbers * size_bytes

    @property
    def size_bytes(self) -> int:
        """Its bytes in a file, without padding."""
        return self.row_bytes * (self.shape[0] if len(self.shape) > 1 else 1)


def padding(size_bytes: int) -> int:
    """Return the bytes from this size to the next multiple of the alignment."""
    return -size_bytes % ALIGNMENT


def header_of(metadata: Mapping[str, Value], tensors: Iterable[GgufTensor]) -> bytes:
    """Return all that precedes the data of a file with these tensors, in this order, padded."""
    tensors = list(tensors)
    found = bytearray(_MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        kind, data = _typed(value)
        found += _string(key) + struct.pack("<I", kind) + data
    offset = 0
    for one in tensors:
        sizes = one.shape[::-1]  # theirs begin with the size whose neighbours lie side by side
        found += _string(one.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        found += struct.pack("<IQ", TYPES[one.type][0], offset)
        offset += one.size_bytes + padding(one.size_bytes)
    return bytes(found) + bytes(padding(len(found)))


def _typed(value: Value) -> tuple[int, bytes]:
    if isinstance(value, bool):  # before int, which it is too
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return _UINT32, struct.pack("<I", value)
    if isinstance(value, float):
        return _FLOAT32, struct.pack("<f", value)
    if isinstance(value, str):
        return _STRING, _string(value)
    items = [_typed(one) for one in value]
    kind = items[0][0] if items else _STRING
    kind = _INT32 if kind == _UINT32 else kind
    return _ARRAY, struct.pack("<IQ", kind, len(items)) + b"".join(data for _, data in items)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
