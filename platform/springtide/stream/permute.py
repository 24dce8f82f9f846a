"""Keyed permutations, computed and never stored; the same on every machine and with every numpy."""

from __future__ import annotations

import numpy as np

from springtide.store.digest import mix

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def key(*parts: int) -> int:
    """Return one 64-bit key made from several non-negative integers; their order matters."""
    state = 0
    for part in parts:
        state = int(mix(np.array([(state ^ part) & _MASK], dtype=np.uint64))[0])
    return state


def permutation(key: int, size: int) -> np.ndarray:
    """Return a permutation of range(size), int64, decided by ``key`` alone: positions sorted by the hash of their number."""
    numbers = np.arange(size, dtype=np.uint64)
    return np.argsort(mix(numbers * np.uint64(_GOLDEN) + np.uint64(key)), kind="stable")
