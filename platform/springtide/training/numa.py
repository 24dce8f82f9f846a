"""Keep a process near its GPU: on the CPUs of the memory node (NUMA) that the GPU's bus is attached to, so that what is staged
for it lies in near memory. As ``torchrun --numa-binding=node`` does."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch


def bind_to_gpu(device: torch.device, sys: str = "/sys", tasks: str = "/proc/self/task") -> set[int]:
    """Let all threads of this process run only on the CPUs near ``device``, of those that they may use. Returns these CPUs;
    none, with nothing changed, if the host has one memory node, or does not say which is near, or none of them may be used.

    Args:
        device: the process's GPU.
        sys: where the kernel shows its devices.
        tasks: folder with this process's threads.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return set()
    near = near_cpus(pci_address(torch.cuda.get_device_properties(device)), sys) & os.sched_getaffinity(0)
    for thread in os.listdir(tasks) if near else ():
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), near)
    return near


def pci_address(properties: object) -> str:
    """Return the bus address of a device, as the kernel writes it, such as ``0000:dc:00.0``; empty if torch does not tell.

    Args:
        properties: as ``torch.cuda.get_device_properties`` returns them.
    """
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return ""
    domain, bus, slot = map(int, parts)  # type: ignore[arg-type]  # none is None
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def near_cpus(address: str, sys: str = "/sys") -> set[int]:
    """Return the CPUs of the memory node that a device's bus is attached to; none if there is only one node, or it is unknown.

    Args:
        address: of the device on its bus.
        sys: where the kernel shows its devices.
    """
    nodes = Path(sys, "devices/system/node")
    try:
        if len(list(nodes.glob("node[0-9]*"))) < 2:
            return set()
        node = int(Path(sys, "bus/pci/devices", address, "numa_node").read_text())
        return _numbers((nodes / f"node{node}" / "cpulist").read_text()) if node >= 0 else set()
    except (OSError, ValueError):
        return set()


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1)) if first else set()
    return found
