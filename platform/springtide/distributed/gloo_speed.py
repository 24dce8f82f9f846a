"""Bytes that two processes of one machine sum per second over gloo: ``python -m springtide.distributed.gloo_speed FILE RANK``.

Both meet in a new file. Each prints one JSON object, with facts about torch. ``springtide doctor`` starts and ends them.
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


def measure(store: dist.Store, rank: int) -> dict[str, Any]:
    """Return the speed of an all-reduce between two processes, and torch's facts.

    Args:
        store: in which both meet.
        rank: 0 or 1.
    """
    group: Any = dist.ProcessGroupGloo(store, rank, 2, _TIMEOUT)
    gradient, times = torch.zeros(_SIZE // 4), []
    for _ in range(1 + _ROUNDS):  # the first one connects
        group.barrier().wait()
        began = time.perf_counter()
        group.allreduce([gradient]).wait()
        times.append(time.perf_counter() - began)
    group.barrier().wait()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    facts = {"cuda": torch.version.cuda or "", "nccl": nccl, "num_gpus": torch.cuda.device_count(), **_code()}
    return {"bytes_per_s": _SIZE / min(times[1:]), **facts}


def _code() -> dict[str, list[str]]:
    """Return what this machine's GPUs are capable of, and what torch has code for; nothing where CUDA does not start."""
    try:
        found = {torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())}
        return {"capabilities": [f"{one}.{two}" for one, two in sorted(found)], "archs": torch.cuda.get_arch_list()}
    except (RuntimeError, AssertionError):  # as with a driver that is too old
        return {"capabilities": [], "archs": []}


if __name__ == "__main__":
    print(json.dumps(measure(dist.FileStore(sys.argv[1], 2), int(sys.argv[2])), allow_nan=False))
