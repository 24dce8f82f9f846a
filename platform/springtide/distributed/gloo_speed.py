"""Speed of a gloo all-reduce between two processes of one machine: ``python -m springtide.distributed.gloo_speed FILE RANK``.

Both processes rendezvous through a new FILE. Each prints one JSON object with the speed and facts about torch. ``springtide
doctor`` starts and ends them.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

_SIZE = 16 * 2**20
"""Size of the tensor to sum, chosen many times larger than a socket's buffers [bytes]."""
_ROUNDS = 3
_TIMEOUT = datetime.timedelta(seconds=30)


def measure(store: dist.Store, rank: int) -> dict[str, Any]:
    """Return the speed of an all-reduce between two processes [bytes/s], and facts about torch, CUDA and NCCL.

    Args:
        store: the store through which both processes rendezvous.
        rank: this process's rank, 0 or 1.
    """
    group: Any = dist.ProcessGroupGloo(store, rank, 2, _TIMEOUT)
    gradient, times = torch.zeros(_SIZE // 4), []
    for _ in range(1 + _ROUNDS):  # the first round includes connecting, and is not counted
        group.barrier().wait()
        began = time.perf_counter()
        group.allreduce([gradient]).wait()
        times.append(time.perf_counter() - began)
    group.barrier().wait()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    facts = {"cuda": torch.version.cuda or "", "nccl": nccl, "num_gpus": torch.cuda.device_count(), **_code()}
    return {"bytes_per_s": _SIZE / min(times[1:]), **facts}


def _code() -> dict[str, list[str]]:
    """Return the compute capabilities of this machine's GPUs, and the capabilities for which this build of torch has code. Both
    are empty if CUDA does not start."""
    try:
        found = {torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())}
        return {"capabilities": [f"{one}.{two}" for one, two in sorted(found)], "archs": torch.cuda.get_arch_list()}
    except (RuntimeError, AssertionError):  # raised for example if the driver is too old
        return {"capabilities": [], "archs": []}


if __name__ == "__main__":
    print(json.dumps(measure(dist.FileStore(sys.argv[1], 2), int(sys.argv[2])), allow_nan=False))
