"""The mark (step and worker group) at the beginning of a staging buffer, and the address where another process finds it."""

from __future__ import annotations

from typing import NamedTuple

MARK_BYTES = 64
"""Bytes reserved for the mark, which precedes the tensors in shared memory. The mark is the step of the tensors as int64, or
NO_STEP while they are being copied, and then the id of the worker group that copied them (GROUP_BYTES)."""
GROUP_BYTES = 16
NO_STEP = -1


class HeldAt(NamedTuple):
    """Where a snapshot's bytes are held in memory: node, process and file descriptor."""

    node: str
    pid: int
    fd: int
    """File descriptor of the memory in process ``pid``."""


def mark(step: int, group: bytes = bytes(GROUP_BYTES)) -> bytes:
    """Return the mark for the tensors of ``step``, copied by worker group ``group``.

    >>> len(mark(7)), mark(7) == mark(7, b"another group id")
    (24, False)
    """
    return step.to_bytes(8, "little", signed=True) + group
