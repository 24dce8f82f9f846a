"""Exponential moving average of the weights (Polyak averaging; Busbridge et al., "How to scale your EMA", 2023), by tokens.

After each update the average is the mean of the weights after all updates so far, in which a weight counts half as much as
one that is ``optim.ema_half_life`` tokens newer. So the initial weights are not in it, and the batch size does not
matter; a skipped update does not count. It is a state of the optimizer: sharded, saved and restored as its moments are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from springtide.checkpoint.averages import AVERAGE
from springtide.checkpoint.tensors import local
from springtide.distributed.fsdp import reshard

_SHARE = "newest_share"
"""Key of the share that the next weights have in the average, in a parameter group."""


def keep_average(optimizer: torch.optim.Optimizer) -> None:
    """Have ``optimizer`` keep an average of its weights. Before its first step they are not in it."""
    optimizer.register_step_post_hook(_update)


def set_newest_share(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Give the weights after the next step ``share`` in the average."""
    for group in optimizer.param_groups:
        group[_SHARE] = share


@contextlib.contextmanager
def averaged_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[bool]:
    """Put the averages in the place of the weights for the block. Yields False if there are none. All ranks call it
    together; no copy of the state may be under way."""
    has_average = any(AVERAGE in state for state in optimizer.state.values())
    if not has_average:
        yield False
        return
    reshard(model)
    _swap(optimizer)
    try:
        yield True
    finally:
        reshard(model)
        _swap(optimizer)


@torch.no_grad()
def _update(optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
    for group in optimizer.param_groups:
        # taken away: where one optimizer's step calls another's, this runs twice
        share = group.pop(_SHARE, None)
        for parameter in group["params"]:
            if AVERAGE in optimizer.state.get(parameter, ()):
                if share is not None:
                    average = local(optimizer.state[parameter][AVERAGE])
                    # each operation rounds once: a fused one would round differently at the end of a shard
                    average.add_((local(parameter.detach()) - average).mul_(share))
            elif parameter.grad is not None:
                optimizer.state[parameter][AVERAGE] = parameter.detach().clone()


@torch.no_grad()
def _swap(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if AVERAGE in state:
            weight, average = local(parameter.detach()), local(state[AVERAGE])
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)
