"""The free memory of this machine or container."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def free_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int:
    """Return the memory that programs on this node can still allocate: what the kernel reports as available, but at most what
    is left to this process's container (cgroup v2). Without Linux's /proc, sys.maxsize [bytes]."""
    if not Path(proc, "meminfo").exists():
        return sys.maxsize
    with open(f"{proc}/meminfo") as file:
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
    free = kib["MemAvailable"] * 1024
    with contextlib.suppress(OSError, ValueError):  # not a container, or one without a limit ("max")
        limit, used = (int(Path(cgroup, f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in Path(cgroup, "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))  # the kernel reclaims that on demand
    return max(0, free)
