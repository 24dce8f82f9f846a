"""What two processes of this machine exchange per second over gloo: ``python -m springtide.dist.link_speed FILE RANK``.

Rank 0 prints one JSON object, with what torch says of itself. ``springtide doctor`` starts both and ends them.
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
"""Bytes of the gradient that is summed: many times a socket's buffers."""
_ROUNDS = 3
_TIMEOUT = datetime.timedelta(seconds=30)


def measure(file: str, rank: int) -> dict[str, Any]:
    """Return the speed of an all-reduce between two processes, and torch's facts.

    Args:
        file: path of a new file in which the two meet.
        rank: 0 or 1.
    """
    store = dist.FileStore(file, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    try:
        gradient, times = torch.zeros(_SIZE // 4), []
        for _ in range(1 + _ROUNDS):  # the first one connects
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(gradient)
            times.append(time.perf_counter() - began)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    facts = {"cuda": torch.version.cuda or "", "nccl": nccl, "num_gpus": torch.cuda.device_count()}
    return {"bytes_per_s": _SIZE / min(times[1:]), **facts}


if __name__ == "__main__":
    found = measure(sys.argv[1], int(sys.argv[2]))
    if sys.argv[2] == "0":
        print(json.dumps(found, allow_nan=False))
