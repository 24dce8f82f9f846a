"""Digests of bytes: BLAKE2b for files, CRC-32 for the pieces a hot path checks."""

from __future__ import annotations

import hashlib
from typing import IO

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
