"""Digests: BLAKE3 of bytes, SplitMix64 of numbers.

BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020) is a cryptographic hash. It hashes 7 GB/s on a core; BLAKE2b and
SHA-256 hash 1 to 2 GB/s. So checksums of whole checkpoints take little of a training machine's time.
"""

from __future__ import annotations

from typing import IO

import numpy as np
from blake3 import blake3

CHUNK_BYTES = 4 * 2**20


def of_bytes(data: bytes | memoryview) -> str:
    """Return the digest of ``data``: the first 128 bits of its BLAKE3 hash, as 32 hex digits."""
    return blake3(data).hexdigest(length=16)


class Running:
    """Computes the same digest as ``of_bytes``, for bytes that arrive in parts."""

    def __init__(self) -> None:
        self._state = blake3()

    def add(self, data: bytes | memoryview) -> None:
        self._state.update(data)

    def end(self) -> str:
        """Return the digest of all bytes added, 32 hex digits, and reset."""
        found = self._state.hexdigest(length=16)
        self._state.reset()
        return found


def of_file(file: IO[bytes]) -> str:
    """Return the digest of an open file, from its current position to its end. Equal to ``of_bytes`` of these bytes, but uses
    little memory."""
    state = Running()
    while chunk := file.read(CHUNK_BYTES):
        state.add(chunk)
    return state.end()


def mix(values: np.ndarray) -> np.ndarray:
    """Return the SplitMix64 hash of each element, uint64. Different numbers always have different hashes (a bijection; the
    finaliser of Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)."""
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
