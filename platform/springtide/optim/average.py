"""Exponential moving average of the weights (Polyak averaging; Busbridge et al., "How to scale your EMA", 2023), with a
half-life in tokens.

The average is a weighted mean of the model's weights after each update so far. Weights count half as much as weights that are
``optim.ema_half_life`` tokens newer, at any batch size. The initial weights are not part of the average, and the average does
not change at a skipped update. The average is optimizer state: sharded, saved and restored like the moments.
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
"""Key in a parameter group. Its value, 0 to 1, is the share of the next step's weights in the new average."""


def keep_average(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer`` keep an average of its weights. There is no average before the optimizer's first step."""
    optimizer.register_step_post_hook(_update)


def set_newest_share(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Set the ``share``, 0 to 1, of the next step's weights in the new average."""
    for group in optimizer.param_groups:
        group[_SHARE] = share


@contextlib.contextmanager
def averaged_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[bool]:
    """Run the body of the ``with`` statement with the averaged weights in the model, and restore the trained weights
    afterwards. If there are no averages, yields False and changes nothing. All ranks must enter the statement together, and not
    while the state is being copied for a checkpoint."""
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
        # remove the share: Muon's step calls AdamW's step, so this hook runs twice, and each group must be averaged only once
        share = group.pop(_SHARE, None)
        for parameter in group["params"]:
            if AVERAGE in optimizer.state.get(parameter, ()):
                if share is not None:
                    average = local(optimizer.state[parameter][AVERAGE])
                    # multiply and add in separate kernels: a fused kernel may round the end of a shard differently, so the
                    # average would depend on where shards are cut
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
