"""Limits of this host: free memory, and the locked and shared memory that communication between GPUs needs."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
from pathlib import Path

_LEAST_LOCKED = 64 * 2**30
"""A limit of locked memory that is certainly enough for RDMA devices [bytes]."""
_LEAST_SHARED = 2**30
"""Shared memory that NCCL's guide recommends for a container: --shm-size=1g [bytes]."""


def rdma_devices(sys: str = "/sys") -> list[str]:
    """Return the RDMA devices of this host: network devices that access memory directly (InfiniBand, RoCE, EFA).

    Args:
        sys: mount point of sysfs, where the kernel lists devices.
    """
    try:
        return sorted(os.listdir(f"{sys}/class/infiniband"))
    except OSError:  # no RDMA devices, or not Linux
        return []


def locked_memory() -> float:
    """Return how much memory a process may lock; infinite without a limit [bytes]. RDMA devices need locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return float("inf") if soft == resource.RLIM_INFINITY else float(soft)


def lacks_locked_memory(sys: str = "/sys") -> str:
    """If this host has RDMA devices but allows too little locked memory, return the problem and a remedy; otherwise an empty
    text.

    Args:
        sys: mount point of sysfs, where the kernel lists devices.
    """
    devices, most = rdma_devices(sys), locked_memory()
    if not devices or most >= _LEAST_LOCKED:
        return ""
    return (
        f"{most / 2**20:g} MiB may be locked, too little for {', '.join(devices)}: memlock unlimited in "
        "/etc/security/limits.conf, or docker run --ulimit memlock=-1"
    )


def lacks_shared_memory(path: str = "/dev/shm") -> str:
    """If less shared memory is free than NCCL needs, return the problem and a remedy; otherwise an empty text.

    Args:
        path: mount point of the memory file system.
    """
    if not os.path.isdir(path):
        return ""
    free = shutil.disk_usage(path).free
    if free >= _LEAST_SHARED:
        return ""
    return (
        f"{free / 2**20:.0f} MiB are free in {path}, and NCCL needs 1024: docker run --shm-size=1g, or remove old files"
    )


# Free memory of this machine or container.


def free_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int:
    """Return the memory that programs on this node can still allocate [bytes].

    This is the memory that the kernel reports as available. In a container it is at most what is left of the container's memory
    limit (cgroup v2). Returns sys.maxsize without Linux's /proc.
    """
    if not Path(proc, "meminfo").exists():
        return sys.maxsize
    with open(f"{proc}/meminfo") as file:
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
    free = kib["MemAvailable"] * 1024
    with contextlib.suppress(OSError, ValueError):  # not a container, or one without a limit ("max")
        limit, used = (int(Path(cgroup, f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in Path(cgroup, "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))  # the kernel reclaims inactive file cache on demand
    return max(0, free)
