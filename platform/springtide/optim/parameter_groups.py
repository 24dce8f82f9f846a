"""Parameter groups by name pattern (``optim.groups``): the group of each parameter, and which parameters are frozen. In a model
with an adapter all parameters outside the adapter are frozen."""

from __future__ import annotations

import difflib
import fnmatch
from typing import TypeGuard

from torch import nn

from springtide.checkpoint.adapters import is_adapter
from springtide.checkpoint.tensors import plain_name
from springtide.config.engine import OptimConfig, ParameterGroup
from springtide.errors import ConfigError, explain
from springtide.model import Decoder, matrices

_NAMES_SHOWN = 3


def group_of(name: str, config: OptimConfig) -> ParameterGroup | None:
    """Return the first group of ``optim.groups`` whose pattern matches the parameter's name; None if no pattern matches."""
    return next((group for group in config.groups if fnmatch.fnmatchcase(name, group.match)), None)


def frozen_names(model: nn.Module, config: OptimConfig) -> set[str]:
    """Return the names of the parameters that ``optim.groups`` or an adapter freezes."""
    names = {plain_name(name) for name, _ in model.named_parameters()}
    frozen = {name for name in names if (group := group_of(name, config)) is not None and group.frozen}
    return frozen | {name for name in names if not is_adapter(name)} if _is_adapted(model) else frozen


def freeze(model: nn.Module, config: OptimConfig) -> None:
    """Freeze the parameters that ``frozen_names`` returns. Call it before the model is sharded, so that FSDP does not
    reduce gradients of frozen parameters."""
    frozen = frozen_names(model, config)
    for name, parameter in model.named_parameters():
        if plain_name(name) in frozen:
            parameter.requires_grad_(False)


def blocks_freeze_alike(model: nn.Module, config: OptimConfig) -> bool:
    """Return True if the same parameters are frozen in every block."""
    by_block: dict[str, set[str]] = {}
    frozen = frozen_names(model, config)
    for name, _ in model.named_parameters():
        room, _, rest = plain_name(name).partition(".")
        if room == "blocks":
            number, _, rest = rest.partition(".")
            by_block.setdefault(number, set()).update({rest} if plain_name(name) in frozen else ())
    return len({frozenset(one) for one in by_block.values()}) <= 1


def check_groups(model: nn.Module, config: OptimConfig) -> None:
    """Raise ConfigError for a pattern that matches no parameter of ``model``, for an adapter that does not fit ``model``, and
    if no parameter is left to train."""
    if _is_adapted(model):
        _check_adapter(model)
    names = [plain_name(name) for name, _ in model.named_parameters()]
    for index, group in enumerate(config.groups):
        if not fnmatch.filter(names, group.match):
            field = f"optim.groups.{index}.match"
            raise ConfigError(
                explain(field, group.match, "matches no parameter of this model", _near(group.match, names))
            )
    trained = {plain_name(name) for name, one in model.named_parameters() if one.requires_grad}
    if config.groups and not trained - frozen_names(model, config):
        patterns = [group.match for group in config.groups if group.frozen]
        raise ConfigError(explain("optim.groups", patterns, "freezes every parameter", "leave some to train"))


def _check_adapter(model: Decoder) -> None:
    rank, found = model.config.adapter_rank, dict(matrices(model.blocks))
    for index, pattern in enumerate(model.config.adapter_targets):
        if not (matched := fnmatch.filter(found, pattern)):
            field = f"model.adapter_targets.{index}"
            raise ConfigError(explain(field, pattern, "matches no matrix of the blocks", _near(pattern, list(found))))
        for name in matched:
            if rank > (side := min(found[name].in_features, found[name].out_features)):
                problem = f"is more than the smaller side of {name}, which is {side}"
                raise ConfigError(
                    explain("model.adapter_rank", rank, problem, "lower it: such an adapter is larger than the matrix")
                )


def _is_adapted(model: nn.Module) -> TypeGuard[Decoder]:
    return isinstance(model, Decoder) and model.config.adapter != "none"


def _near(pattern: str, names: list[str]) -> str:
    near = difflib.get_close_matches(pattern, names, _NAMES_SHOWN, cutoff=0.5) or names[:_NAMES_SHOWN]
    return f"names are such as {', '.join(near)}"
