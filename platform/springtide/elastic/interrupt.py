"""What may be asked of a group of workers between two steps."""

from __future__ import annotations

import enum


class Interrupt(enum.Enum):
    """A request; all ranks hear it in the same step."""

    SAVE = "save"
    """Write a checkpoint and go on."""
    STOP = "stop"
    """Write a checkpoint and return."""
    LEAVE = "leave"
    """Bring the state to safety, in memory if it is kept there, and return: another group goes on."""
    EVACUATE = "evacuate"
    """As ``LEAVE``, but into the store: no memory is left."""
