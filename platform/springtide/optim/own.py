"""The optimizer that a config names in place of ours.

``optim.source`` names a user's function, ``package.module:function``, called as ``function(named_parameters, config)`` with
the parameters that train, a list of ``(name, parameter)``, and the config's ``optim`` section. It returns a
``torch.optim.Optimizer`` that holds all of them. Then

    rates follow the schedule: what a group's ``lr`` is at first is its rate at ``optim.peak_lr``
    gradients are summed over ranks, and clipped, before its step
    ``optim.ema_half_life`` averages its weights; ``optim.groups`` may freeze some
    parameters of a sharded model are DTensors: operations of each element by itself need no care, norms do

Its state is saved and resharded if it consists of tensors: each like its parameter, made by ``torch.zeros_like``, or a scalar
that all ranks share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from springtide.checkpoint.tensors import plain_name
from springtide.config.code import find_code
from springtide.config.engine import OptimConfig
from springtide.errors import ConfigError, TrainingFailed, explain

_FIELD = "optim.source"
_NAMES_SHOWN = 3


def own_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimizer that ``optim.source`` makes. Raises ConfigError if it is none, or leaves parameters out."""
    function = find_code(_FIELD, config.source)
    named = [(plain_name(name), one) for name, one in model.named_parameters() if one.requires_grad]
    optimizer = function(list(named), config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"returned a {type(optimizer).__name__}"
        raise ConfigError(explain(_FIELD, config.source, what, "return a torch.optim.Optimizer"))
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    known = {id(one): name for name, one in named}
    lacking = [name for one, name in known.items() if one not in held]
    if lacking or held - known.keys():
        shown = f"{', '.join(lacking[:_NAMES_SHOWN])} of {len(lacking)} that it leaves out" if lacking else "others"
        what = f"does not hold the parameters that it was given, but {shown}" if not lacking else f"lacks {shown}"
        remedy = "hold them all; freeze those that must not train by optim.groups"
        raise ConfigError(explain(_FIELD, config.source, what, remedy))
    for group in optimizer.param_groups:
        if "lr" not in group:
            what = "returned an optimizer whose parameter groups have no lr, which the schedule sets"
            raise ConfigError(explain(_FIELD, config.source, what, "give each group lr = config.peak_lr"))
        group.setdefault("lr_scale", float(group["lr"]) / config.peak_lr)
    _check_first_step(optimizer, config.source, known)
    return optimizer


def _check_first_step(optimizer: torch.optim.Optimizer, source: str, names: dict[int, str]) -> None:
    """Have the first step check that the state can be saved at any world size."""
    checked = False

    def check(_optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        nonlocal checked
        if checked:
            return
        checked = True
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                wrong = ""
                if value is not None and not isinstance(value, Tensor):
                    wrong = f"a {type(value).__name__}: keep it in a tensor"
                elif (
                    isinstance(parameter, DTensor)
                    and value is not None
                    and value.dim()
                    and not isinstance(value, DTensor)
                ):
                    wrong = f"a plain tensor {tuple(value.shape)}, of a sharded parameter: make it by torch.zeros_like"
                if wrong:
                    raise TrainingFailed(f"{_FIELD} = {source!r}: state {key} of {names[id(parameter)]} is {wrong}")

    optimizer.register_step_post_hook(check)
