"""Requests to a worker group, carried out between two steps."""

from __future__ import annotations

import enum


class GroupRequest(enum.Enum):
    """A request; all ranks receive it in the same step."""

    COPY = "copy"
    """Copy the state to the memory of nodes that stay, keep no later copy on nodes that will be taken away, and continue."""
    SAVE = "save"
    """Write a checkpoint and continue."""
    STOP = "stop"
    """Write a checkpoint and return."""
    LEAVE = "leave"
    """Bring the state to safety, in memory if snapshots are kept there, and return: another worker group resumes."""
    EVACUATE = "evacuate"
    """As ``LEAVE``, but write to the store: no node stays to keep the state in memory."""
