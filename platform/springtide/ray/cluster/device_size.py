"""What the cluster's GPUs say of their own memory: a task on each kind asks one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import ray

_WAIT_S = 30.0
"""A task that has not begun by then waits for a GPU that others use: the data sheet counts then."""
ACCELERATOR = "accelerator_type:"
"""What begins Ray's name of a kind of device, as a resource of nodes that have one."""
_A_LITTLE = 0.001
"""The part that a task takes of a node's one unit of the resource that names its kind of GPU."""
_TASK = "measure-memory"


class DeviceSize(NamedTuple):
    """Memory of a device."""

    total_bytes: int = 0
    """As the driver counts it; 0 if nobody said [bytes]."""
    used_bytes: int = 0
    """What a process has used before its first tensor: its context, and what others hold [bytes]."""


def device_sizes(kinds: Sequence[str], gpus: float) -> list[DeviceSize]:
    """Return what a device of each kind says, as far as one is free.

    Args:
        kinds: Ray's names of them.
        gpus: of a worker.
    """
    tasks = [
        ray.remote(_size)
        .options(name=_TASK, num_cpus=0, num_gpus=gpus, resources={f"{ACCELERATOR}{kind}": _A_LITTLE}, max_retries=0)
        .remote()
        for kind in kinds
    ]
    if not tasks:
        return []
    done, late = ray.wait(tasks, num_returns=len(tasks), timeout=_WAIT_S)
    for task in late:
        ray.cancel(task, force=True)
    said = (_answer(task) for task in done)
    return [one for one in said if one.total_bytes]


def _answer(task: object) -> DeviceSize:
    try:
        found: DeviceSize = ray.get(task)
    except Exception:  # a node that left, or has no torch: the run itself tells
        return DeviceSize()
    return found


def _size() -> DeviceSize:
    import torch

    if not torch.cuda.is_available():
        return DeviceSize()
    one = torch.ones(1, 16, device="cuda", dtype=torch.bfloat16)
    one @ one.T  # loads the library of products, whose workspace counts
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return DeviceSize(total, total - free - torch.cuda.memory_reserved())
