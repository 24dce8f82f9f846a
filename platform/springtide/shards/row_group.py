"""A view of a row group's rows in its bytes, without Parquet decoding.

Tokens are stored in Parquet's BYTE_STREAM_SPLIT encoding: the lowest byte of every token, then the next byte of every token,
four such planes in all, because Parquet's smallest integer has 32 bits. The planes above the token type hold zeros; they
come last and are never read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from springtide.shards.shard_table import RowGroup


class Rows(NamedTuple):
    """Rows of a split."""

    sample_ids: np.ndarray
    """int64 (rows,), as stored with the tokens."""
    num_bytes: np.ndarray
    """int32 (rows,): length of the text that the predicted tokens of a row stand for [bytes]."""
    tokens: np.ndarray
    """uint16 or uint32 (rows, sequence_length + 1); the top bit is the loss mask."""


class RowGroupView:
    """A view of a row group; ``data`` holds its bytes from ``group.sample_ids`` to ``group.end``."""

    def __init__(self, data: memoryview | np.ndarray, group: RowGroup, token_type: str, memory_type: str = "") -> None:
        """``memory_type``: of the tokens that are returned, if it is not ``token_type``."""

        def array(begin: int, end: int, kind: str) -> np.ndarray:
            return np.frombuffer(data[begin - group.sample_ids : end - group.sample_ids], dtype=kind)

        self.num_data_bytes, self.rows = group.end - group.sample_ids, group.rows
        self._type = np.dtype(memory_type or token_type)
        self._sample_ids = array(group.sample_ids, group.sample_ids + 8 * group.rows, "<i8")
        self._num_bytes = array(group.num_bytes, group.num_bytes + 4 * group.rows, "<i4")
        self._planes = array(group.tokens, group.end, "u1").reshape(np.dtype(token_type).itemsize, group.rows, -1)

    def take(self, index: np.ndarray) -> Rows:
        """Return the rows of the group at ``index``, int64 (n,)."""
        # numpy's take of whole rows is faster than indexing, and its shift needs no copy before
        *lower, highest = self._planes
        tokens: np.ndarray = highest.take(index, axis=0)
        for plane in reversed(lower):
            tokens = np.left_shift(tokens, 8, dtype=self._type)
            tokens |= plane.take(index, axis=0)
        return Rows(self._sample_ids.take(index), self._num_bytes.take(index), tokens.astype(self._type, copy=False))

    def exceeds(self, last_id: int) -> bool:
        """Return whether an id of the group is larger than ``last_id``; reads no more planes than it takes to know."""
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
