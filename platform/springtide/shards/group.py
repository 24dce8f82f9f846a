"""The rows of a row group, seen in its bytes without a copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from springtide.shards.manifest import Group


class Rows(NamedTuple):
    """Rows of a split."""

    sample_ids: np.ndarray
    """int64 (rows,), as stored beside the tokens."""
    num_bytes: np.ndarray
    """int32 (rows,): text that the predicted tokens of a row stand for [bytes]."""
    tokens: np.ndarray
    """uint16 or uint32 (rows, sequence_length + 1)."""


def view(data: memoryview | np.ndarray, group: Group) -> Rows:
    """``data``: the bytes from ``group.sample_ids`` to ``group.end``."""

    def array(begin: int, end: int, kind: str) -> np.ndarray:
        return np.frombuffer(data[begin - group.sample_ids : end - group.sample_ids], dtype=kind)

    return Rows(
        array(group.sample_ids, group.sample_ids + 8 * group.rows, "<i8"),
        array(group.num_bytes, group.num_bytes + 4 * group.rows, "<i4"),
        array(group.tokens, group.end, "<u4").reshape(group.rows, -1),
    )
