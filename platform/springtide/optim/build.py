"""Build the optimizer that a config names; compute the norm of sharded gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from springtide.checkpoint.adapters import is_adapter
from springtide.checkpoint.tensors import local, plain_name
from springtide.config.code import find_code
from springtide.config.engine import OptimConfig, ParallelConfig
from springtide.distributed.offload import weights_on
from springtide.errors import ConfigError, TrainingFailed, explain, look_up
from springtide.model import Decoder
from springtide.optim.adafactor import Adafactor
from springtide.optim.adam import Lamb, ShardAdamW
from springtide.optim.average import keep_average
from springtide.optim.muon import Muon
from springtide.optim.parameter_groups import group_of
from springtide.optim.small_moments import SmallMomentsAdamW

_Groups = list[dict[str, Any]]


def optimizer_of(model: nn.Module, config: OptimConfig, fused: bool = True) -> torch.optim.Optimizer:
    """Return the optimizer that ``config`` names: AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019),
    LAMB, Adafactor, Muon for the matrices of ``blocks``, or a user's own (``optim.source``).

    Weight decay applies to matrices and not to vectors, unless ``optim.groups`` changes this. With ``optim.ema_half_life`` the
    optimizer keeps an average of the weights. Raises ConfigError if Muon finds no matrices in ``blocks``.

    With ``model.base_width`` the matrices of blocks have their own learning rate. Their decay per step, which is the rate times
    ``weight_decay``, equals the decay of other matrices. So weights average over the same number of steps at every width (Wang
    and Aitchison, "How to set AdamW's weight decay as you scale model and dataset size", 2024).

    ``fused``: use torch's fused optimizer, which is faster; see ``may_fuse``.
    """
    optimizer = own_optimizer(model, config) if config.source else _ours(model, config, fused)
    if config.ema_half_life:
        keep_average(optimizer)
    return optimizer


def may_fuse(config: ParallelConfig, device: torch.device) -> bool:
    """Return True if the optimizer of a model that computes on ``device`` may use torch's fused kernels. On a CPU such a kernel
    rounds the last few elements of a shard, which do not fill a vector register, differently from the rest. The last bit then
    depends on where shards are cut, so a run with ``parallel.exact`` does not use fused kernels on a CPU."""
    return not (config.exact and weights_on(config, device).type == "cpu")


def _ours(model: nn.Module, config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    others, matrices = _groups(model, config)
    return look_up(_OPTIMIZERS, "optim.optimizer", config.optimizer)(others, matrices, config, fused)


def _adamw(others: _Groups, matrices: _Groups, config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    if config.moments != "fp32":
        return SmallMomentsAdamW([*others, *matrices], config.peak_lr, config.betas, config.eps, config.moments)
    return ShardAdamW([*others, *matrices], **_options(config, fused))


def _adafactor(others: _Groups, matrices: _Groups, config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    return Adafactor([*others, *matrices], config.peak_lr)


def _lamb(others: _Groups, matrices: _Groups, config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    return Lamb([*others, *matrices], config.peak_lr, config.betas, config.eps)


def _muon(others: _Groups, matrices: _Groups, config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    if not matrices:
        remedy = "give it ``blocks`` (springtide.model.source), or use adamw"
        raise ConfigError(explain("optim.optimizer", "muon", "finds no matrices in the blocks of this model", remedy))
    return Muon(matrices, others, **_options(config, fused))


def _options(config: OptimConfig, fused: bool) -> dict[str, Any]:
    return {"lr": config.peak_lr, "betas": config.betas, "eps": config.eps, "fused": fused, "foreach": not fused}


_OPTIMIZERS: dict[str, Callable[[_Groups, _Groups, OptimConfig, bool], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "lamb": _lamb,
    "muon": _muon,
}
"""Value of ``optim.optimizer`` -> function that builds the optimizer. Its arguments: the two lists that ``_groups`` returns,
config, fused."""


def _groups(model: nn.Module, config: OptimConfig) -> tuple[_Groups, _Groups]:
    """Return two lists of parameter groups, without frozen parameters. The second list has the matrices of blocks, the first
    list all other parameters. Only Muon and ``model.base_width`` need this separation. Without them, all parameters are in the
    first list and the second is empty."""
    wider = model.config.width_multiplier if isinstance(model, Decoder) else 1.0
    apart = config.optimizer == "muon" or wider != 1.0
    blocks = {id(one) for one in getattr(model, "blocks", nn.ModuleList()).parameters() if apart and one.dim() == 2}
    found: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_apart, own = id(parameter) in blocks, group_of(plain_name(name), config)
        decay = config.weight_decay if parameter.dim() >= 2 else 0.0
        decay = own.weight_decay if own is not None and own.weight_decay is not None else decay
        # the base width does not scale the learning rates of adapters: the adapter matrix B has as many inputs as its rank,
        # whatever the width of the model
        scale, width = own.lr_scale if own else 1.0, wider if is_apart and not is_adapter(name) else 1.0
        found.setdefault((is_apart, scale / width, decay * width), []).append(parameter)
    others: _Groups = []
    matrices: _Groups = []
    for (is_apart, scale, decay), parameters in found.items():
        group = {"params": parameters, "lr_scale": scale, "lr": config.peak_lr * scale, "weight_decay": decay}
        (matrices if is_apart else others).append(group)
    return others, matrices


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's shard of every gradient."""
    return [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


def square_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares over this rank's shards, a float64 scalar. The sum of this value over the ranks that share
    one copy of the model is the square of the global norm."""
    # in float64, so that the result does not depend on where shards are cut
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
    return torch.stack(norms).pow(2).sum()


# A user's own optimizer.
#
# ``optim.source`` names a user's function, as ``package.module:function``. It is called as ``function(named_parameters,
# config)``. ``named_parameters`` is a list of ``(name, parameter)`` of the parameters that train. ``config`` is the ``optim``
# section of the config. The function returns a ``torch.optim.Optimizer`` that contains all of these parameters. The user's code
# can rely on:
#
# - learning rates follow the schedule: a group's initial ``lr`` is its rate when the schedule is at its peak, ``optim.peak_lr``
# - gradients are summed over ranks, and clipped, before the optimizer's step
# - ``optim.ema_half_life`` averages the weights; ``optim.groups`` may freeze some weights
# - parameters of a sharded model are DTensors: elementwise operations work as usual, a norm must include all ranks' shards
#
# The optimizer's state is saved and resharded if it consists of tensors. Each tensor must have the shape and sharding of its
# parameter, as from ``torch.zeros_like``, or be a scalar that is equal on all ranks.

_FIELD = "optim.source"
_NAMES_SHOWN = 3


def own_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimizer that ``optim.source`` makes. Raises ConfigError if the result is not an optimizer, does not hold
    exactly the given parameters, or has a group without ``lr``."""
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
        shown = f"{', '.join(lacking[:_NAMES_SHOWN])} ({len(lacking)} in all)"
        what = f"leaves out parameters: {shown}" if lacking else "also holds parameters that it was not given"
        remedy = "hold them all; freeze those that must not train by optim.groups"
        raise ConfigError(explain(_FIELD, config.source, what, remedy))
    for group in optimizer.param_groups:
        if "lr" not in group:
            what = "returned an optimizer whose parameter groups have no lr, which the schedule sets"
            raise ConfigError(explain(_FIELD, config.source, what, "set lr = config.peak_lr in each group"))
        group.setdefault("lr_scale", float(group["lr"]) / config.peak_lr)
    _check_first_step(optimizer, config.source, known)
    return optimizer


def _check_first_step(optimizer: torch.optim.Optimizer, source: str, names: dict[int, str]) -> None:
    """Register a hook that checks, after the first step, that the optimizer's state can be saved and resharded."""
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
