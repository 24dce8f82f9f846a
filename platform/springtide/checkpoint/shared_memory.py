"""The header of a staging buffer, called its mark (step and random id), and the address at which another process opens the
buffer."""

from __future__ import annotations

from typing import NamedTuple

MARK_BYTES = 64
"""Bytes reserved for the mark, the header in front of the tensors in shared memory. The mark is the step of the tensors
(int64), then a random id (GROUP_BYTES). Each rank draws its id once, for all tensors that it copies. While tensors are being
copied, the step is NO_STEP."""
GROUP_BYTES = 16
NO_STEP = -1


class HeldAt(NamedTuple):
    """Where a snapshot's bytes are held in memory: node, process and file descriptor."""

    node: str
    pid: int
    fd: int
    """File descriptor of the memory in process ``pid``."""


def mark(step: int, group: bytes = bytes(GROUP_BYTES)) -> bytes:
    """Return the mark for the tensors of ``step``. ``group``: random id of the rank that copied them.

    >>> len(mark(7)), mark(7) == mark(7, b"another group id")
    (24, False)
    """
    return step.to_bytes(8, "little", signed=True) + group
