"""What a new process does before it joins a group: a step of a small model, alone, and a look at its device.

All that is loaded, compiled or allocated the first time is then there when others wait for it; and a device that computes
wrong, or slowly, is found before anybody trains with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from springtide.config import Config
from springtide.elastic.health import Health
from springtide.model import build
from springtide.parallel import World, backend, parallelize, world
from springtide.train.optim import adamw
from springtide.train.peak import peak_flops, wait_for
from springtide.train.step import train_step

_VOCABULARY = 256
_ROWS = 2
_LENGTH = 32
_SIZE = 768
_COPY_BYTES = 64 * 2**20
_ROUNDS = 5


def rehearse(config: Config) -> Health:
    """Do it. The process is in no process group, before and after."""
    with _alone("cuda" if config.elastic.gpus_per_worker else "cpu") as here:
        if config.parallel.threads:
            torch.set_num_threads(config.parallel.threads)
        _step(config, here)
        peak_flops(here.device)
        return examine(here.device)


def examine(device: torch.device) -> Health:
    """How fast the device multiplies and copies, and whether it does so right. On a CPU seconds are those of this thread: who
    else uses the machine does not matter."""
    small = torch.arange(_SIZE, dtype=torch.float32, device=device) % 8
    a = small.repeat(_SIZE, 1)
    multiply_s, product = _best_s(device, lambda: a @ a.T)
    # integers far below 2**24: every order of summing is exact
    wrong = "" if bool((product == (small * small).sum()).all()) else "multiplies wrong"
    pattern = torch.arange(_COPY_BYTES // 8, dtype=torch.int64, device=device)
    copy_s, copy = _best_s(device, pattern.clone)
    if not torch.equal(copy, pattern):
        wrong = "copies wrong"
    return Health(2 * _SIZE**3 / multiply_s, 2 * _COPY_BYTES / copy_s, wrong)


def _best_s(device: torch.device, function: object) -> tuple[float, torch.Tensor]:
    assert callable(function)
    best, found = float("inf"), function()
    for _ in range(_ROUNDS):
        wait_for(device)
        begin = _clock(device)
        found = function()
        wait_for(device)
        best = min(best, _clock(device) - begin)
    return max(best, 1e-9), found


def _clock(device: torch.device) -> float:
    return time.perf_counter() if device.type == "cuda" else time.thread_time()


def _step(config: Config, here: World) -> None:
    small = config.model.model_copy(update={"num_layers": 1})
    model = parallelize(build(small, _VOCABULARY, None), config.parallel, here)
    optimizer = adamw(model, config.optim, fused=config.parallel.reduction != "fp64" or here.device.type != "cpu")
    length = min(_LENGTH, config.model.max_sequence_length)
    rows_NL = torch.randint(_VOCABULARY, (_ROWS, length + 1), device=here.device)
    whole = [slice(0, _ROWS)]
    train_step(model, optimizer, rows_NL, 0, here, micro_batches=whole, tokens_per_step=_ROWS * length, clip_norm=1.0)


@contextlib.contextmanager
def _alone(device_type: str) -> Iterator[World]:
    """A process group of one."""
    dist.init_process_group(backend(device_type), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield world(device_type)
    finally:
        dist.destroy_process_group()
