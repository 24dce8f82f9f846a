"""Requests of the driver to a worker group, such as to save. The group carries them out between two steps."""

from __future__ import annotations

import enum


class GroupRequest(enum.Enum):
    """A request to a worker group; all its ranks receive it in the same step."""

    COPY = "copy"
    """Copy the state to the memory of nodes that stay, and continue. Later copies are not placed on nodes that will be taken
    away."""
    SAVE = "save"
    """Write a checkpoint and continue."""
    STOP = "stop"
    """Write a checkpoint and end training."""
    LEAVE = "leave"
    """Copy the state to other nodes' memory if the run keeps snapshots there, else write a checkpoint. Then end: another worker
    group resumes."""
    EVACUATE = "evacuate"
    """Write a checkpoint to storage and end, so that another worker group resumes. Used if no node stays to keep the state in
    memory."""
