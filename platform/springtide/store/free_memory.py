"""How much memory programs on this machine can still have."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def free_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int:
    """Returns the memory that programs on this node can still have: what the kernel calls available, and no more than the
    container of this process may have (cgroup v2); more than any machine has where no Linux says [bytes]."""
    if not Path(proc, "meminfo").exists():
        return sys.maxsize
    with open(f"{proc}/meminfo") as file:
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
    free = kib["MemAvailable"] * 1024
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        limit, used = (int(Path(cgroup, f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in Path(cgroup, "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))  # the kernel gives that back when asked
    return max(0, free)
