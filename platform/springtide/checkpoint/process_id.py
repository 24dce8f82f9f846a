"""Which process of this machine has a pid: pids are given again."""

from __future__ import annotations

from pathlib import Path


def process_id(pid: int) -> str:
    """Return what distinguishes a process of this machine from a later one with its pid: boot id and start time; empty
    if it cannot be read, or the process is a zombie.

    Examples:
        >>> import os
        >>> process_id(os.getpid()) == process_id(os.getpid()) != process_id(1)
        True
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else f"{boot}-{rest[18]}"
    except (OSError, IndexError):
        return ""
