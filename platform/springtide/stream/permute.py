"""Keyed permutations and hashes, computed and never stored; the same on every machine and every numpy.

SplitMix64 is the finaliser of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64 of each element; uint64 in, uint64 out, a bijection."""
    z = values.astype(np.uint64) + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def key(*parts: int) -> int:
    """One 64-bit key out of several non-negative integers; order counts."""
    state = 0
    for part in parts:
        state = int(mix(np.array([(state ^ part) & _MASK], dtype=np.uint64))[0])
    return state


def permutation(key: int, size: int) -> np.ndarray:
    """A permutation of range(size), int64, decided by ``key`` alone: positions sorted by the hash of their number."""
    numbers = np.arange(size, dtype=np.uint64)
    return np.argsort(mix(numbers * np.uint64(_GOLDEN) + np.uint64(key)), kind="stable")
