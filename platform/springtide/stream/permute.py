"""Keyed permutations, computed and never stored; the same on every machine and with every numpy."""

from __future__ import annotations

import math

import numpy as np

from springtide.storage.digest import mix

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6


def keys(*parts: int | np.ndarray) -> np.ndarray:
    """Return 64-bit keys, uint64 (n,) or (1,), made from several non-negative integers, or arrays of them; their order
    matters."""
    state: np.ndarray = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = mix(state ^ np.asarray(part).astype(np.uint64))
    return state


def permutation(key: np.ndarray, size: int) -> np.ndarray:
    """Return a permutation of range(size), int64, decided by ``key`` alone: positions sorted by the hash of their number."""
    numbers = np.arange(size, dtype=np.uint64)
    return np.argsort(mix(numbers * _GOLDEN + key), kind="stable")


def permuted(key: np.ndarray, places: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return where the permutation of range(size) by ``key`` sends each place, int64 (n,); each place has its own key and size.

    A Feistel network over pairs of digits in base ceil(sqrt(size)), whose square is little more than the size; what leaves the
    range walks on along its cycle until it is inside again.

    Args:
        key: uint64 (n,).
        places: int64 (n,), each below its size.
        sizes: int64 (n,).

    Source:
        Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002: generalised Feistel and cycle walking.
    """
    found = places.astype(np.uint64)
    sizes = sizes.astype(np.uint64)
    base = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64)  # exact to 2**52 rows
    outside = np.arange(len(found))
    while len(outside):
        here, side, of = found[outside], base[outside], key[outside]
        left, right = here // side, here % side
        for number in range(_ROUNDS):
            left, right = right, (left + mix(right * _GOLDEN + of + np.uint64(number))) % side
        found[outside] = left * side + right
        outside = outside[found[outside] >= sizes[outside]]
    return found.astype(np.int64)


def spread(size: int) -> int:
    """Return a factor f for which i * f mod size, over i in range(size), is a permutation that lays any consecutive i evenly
    over the range: nearest to the golden section of ``size`` among those that have no divisor in common with it."""
    golden = round(size * (5**0.5 - 1) / 2)
    return next(f for f in range(max(golden, 1), 2 * size + 2) if math.gcd(f, size) == 1)
