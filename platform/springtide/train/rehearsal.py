"""What a new process does before it joins a group: a step of a small model, alone, and a look at its device.

All that is loaded, compiled or allocated the first time is then there when others wait for it; and a device that computes
wrong, or slowly, is found before anybody trains with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from springtide.config import Config
from springtide.elastic.health import Health
from springtide.model import skeleton
from springtide.parallel import World, backend, parallelize, world
from springtide.train.optim import optimizer_of
from springtide.train.peak import peak_flops
from springtide.train.probe import examine
from springtide.train.step import train_step
from springtide.train.weights import initialize

_VOCABULARY = 256
_ROWS = 2
_LENGTH = 32


def rehearse(config: Config) -> Health:
    """Do it. The process is in no process group, before and after."""
    with _alone("cuda" if config.elastic.gpus_per_worker else "cpu") as here:
        if config.parallel.threads:
            torch.set_num_threads(config.parallel.threads)
        if not config.model.source:  # that of a user's may be large
            _step(config, here)
        peak_flops(here.device)
        return examine(here.device)


def _step(config: Config, here: World) -> None:
    small = config.model.model_copy(update={"num_layers": 1})
    model = parallelize(skeleton(small, _VOCABULARY, None), config.parallel, here)
    initialize(model, small, _VOCABULARY)
    optimizer = optimizer_of(
        model, config.optim, fused=config.parallel.reduction != "fp64" or here.device.type != "cpu"
    )
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
