"""Digests: BLAKE2b of bytes, SplitMix64 of numbers."""

from __future__ import annotations

import hashlib
from typing import IO

import numpy as np

CHUNK_BYTES = 4 * 2**20


def of_bytes(data: bytes | memoryview) -> str:
    """32 hex digits of BLAKE2b-128."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def of_file(file: IO[bytes]) -> str:
    """As ``of_bytes``, streaming."""
    state = hashlib.blake2b(digest_size=16)
    while chunk := file.read(CHUNK_BYTES):
        state.update(chunk)
    return state.hexdigest()


def mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64 of each element; uint64 in, uint64 out, a bijection (the finaliser of Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014)."""
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
