"""What two processes exchange per second over gloo, and how far their clocks are apart:
``python -m springtide.dist.link_speed MEET RANK``. They meet in a new file, or at ``tcp://HOST:PORT``, where rank 0 listens.

Each prints one JSON object, with what torch says of itself. ``springtide doctor`` starts and ends them.
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
_ROUNDS, _ASKS = 3, 10
_TIMEOUT = datetime.timedelta(seconds=30)
_WAIT = datetime.timedelta(seconds=120)
"""How long one process waits for the other."""


def meeting(place: str, rank: int) -> dist.Store:
    """Return what two processes meet in.

    Args:
        place: path of a new file, or ``tcp://HOST:PORT``.
        rank: 0 or 1; rank 0 listens at the port.
    """
    if not place.startswith("tcp://"):
        return dist.FileStore(place, 2)
    host, _, port = place.removeprefix("tcp://").rpartition(":")
    return dist.TCPStore(host.strip("[]"), int(port), 2, is_master=rank == 0, timeout=_WAIT)


def measure(store: dist.Store, rank: int) -> dict[str, Any]:
    """Return the speed of an all-reduce between two processes, how far the other's clock is ahead, and torch's facts.

    Args:
        store: as ``meeting`` returns it.
        rank: 0 or 1.
    """
    group: Any = dist.ProcessGroupGloo(store, rank, 2, _TIMEOUT)
    gradient, times = torch.zeros(_SIZE // 4), []
    for _ in range(1 + _ROUNDS):  # the first one connects
        group.barrier().wait()
        began = time.perf_counter()
        group.allreduce([gradient]).wait()
        times.append(time.perf_counter() - began)
    ahead_s, error_s = _clocks(group, rank)
    group.barrier().wait()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    facts = {"cuda": torch.version.cuda or "", "nccl": nccl, "num_gpus": torch.cuda.device_count(), **_code()}
    return {"bytes_per_s": _SIZE / min(times[1:]), "ahead_s": ahead_s, "error_s": error_s, **facts}


def _code() -> dict[str, list[str]]:
    """Return what this machine's GPUs are capable of, and what torch has code for; nothing where CUDA does not start."""
    try:
        found = {torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())}
        return {"capabilities": [f"{one}.{two}" for one, two in sorted(found)], "archs": torch.cuda.get_arch_list()}
    except (RuntimeError, AssertionError):  # as with a driver that is too old
        return {"capabilities": [], "archs": []}


def _clocks(group: Any, rank: int) -> tuple[float, float]:
    """Return how far the other's clock is ahead, and by how much that may be wrong [s]: rank 1 asks for the time, and the
    answer that came soonest counts (Cristian, 1989)."""
    best = (float("inf"), 0.0)
    for _ in range(_ASKS):
        told = torch.zeros(1, dtype=torch.float64)
        if rank == 0:
            group.recv([told], 1, 0).wait()
            told[0] = time.time()
            group.send([told], 1, 0).wait()
        else:
            # in this order: the bound holds also for who is interrupted
            began, asked_s = time.perf_counter(), time.time()
            group.send([told], 0, 0).wait()
            group.recv([told], 0, 0).wait()
            took_s = time.perf_counter() - began
            best = min(best, (took_s / 2, told.item() - (asked_s + took_s / 2)))
    found = torch.tensor(best if rank else (0.0, 0.0), dtype=torch.float64)
    group.allreduce([found]).wait()
    error_s, ahead_s = found.tolist()
    return (ahead_s if rank else -ahead_s), error_s


if __name__ == "__main__":
    print(json.dumps(measure(meeting(sys.argv[1], int(sys.argv[2])), int(sys.argv[2])), allow_nan=False))
