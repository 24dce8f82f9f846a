"""What stands before the tensors in a staging buffer, and where another process finds the buffer."""

from __future__ import annotations

from typing import NamedTuple

MARK_BYTES = 64
"""Bytes before the tensors in shared memory: their step as int64, or NO_STEP while they are being copied; then the id of the
worker group that copied them, GROUP_BYTES long."""
GROUP_BYTES = 16
NO_STEP = -1


class HeldAt(NamedTuple):
    """A place of a snapshot's bytes."""

    node: str
    pid: int
    fd: int
    """File descriptor of the memory in process ``pid``."""


def mark(step: int, group: bytes = bytes(GROUP_BYTES)) -> bytes:
    """Return what stands before the tensors of ``step`` in shared memory.

    >>> len(mark(7)), mark(7) == mark(7, b"another group id")
    (24, False)
    """
    return step.to_bytes(8, "little", signed=True) + group
