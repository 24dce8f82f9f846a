"""Parameter groups by pattern (``optim.groups``): which one a parameter is in, and which parameters are frozen."""

from __future__ import annotations

import difflib
import fnmatch

from torch import nn

from springtide.checkpoint.tensors import plain_name
from springtide.config.engine import OptimConfig, ParameterGroup
from springtide.errors import ConfigError, explain

_NAMES_SHOWN = 3


def group_of(name: str, config: OptimConfig) -> ParameterGroup | None:
    """Return the first group whose pattern matches the name of a parameter; None if there is none."""
    return next((group for group in config.groups if fnmatch.fnmatchcase(name, group.match)), None)


def frozen_names(model: nn.Module, config: OptimConfig) -> set[str]:
    """Return the names of the parameters that ``optim.groups`` freezes."""
    names = (plain_name(name) for name, _ in model.named_parameters())
    return {name for name in names if (group := group_of(name, config)) is not None and group.frozen}


def freeze(model: nn.Module, config: OptimConfig) -> None:
    """Freeze what ``optim.groups`` freezes; before the model is laid out, which then reduces no gradients of it."""
    frozen = frozen_names(model, config)
    for name, parameter in model.named_parameters():
        if plain_name(name) in frozen:
            parameter.requires_grad_(False)


def blocks_freeze_alike(model: nn.Module, config: OptimConfig) -> bool:
    """Return whether the same parameters of every block are frozen."""
    by_block: dict[str, set[str]] = {}
    frozen = frozen_names(model, config)
    for name, _ in model.named_parameters():
        room, _, rest = plain_name(name).partition(".")
        if room == "blocks":
            number, _, rest = rest.partition(".")
            by_block.setdefault(number, set()).update({rest} if plain_name(name) in frozen else ())
    return len({frozenset(one) for one in by_block.values()}) <= 1


def check_groups(model: nn.Module, config: OptimConfig) -> None:
    """Raise ConfigError for a pattern that matches no parameter of ``model``, and if nothing is left to train."""
    names = [plain_name(name) for name, _ in model.named_parameters()]
    for index, group in enumerate(config.groups):
        if not fnmatch.filter(names, group.match):
            near = difflib.get_close_matches(group.match, names, _NAMES_SHOWN, cutoff=0.5) or names[:_NAMES_SHOWN]
            remedy = f"names are such as {', '.join(near)}"
            field = f"optim.groups.{index}.match"
            raise ConfigError(explain(field, group.match, "matches no parameter of this model", remedy))
    trained = {plain_name(name) for name, one in model.named_parameters() if one.requires_grad}
    if config.groups and not trained - frozen_names(model, config):
        patterns = [group.match for group in config.groups if group.frozen]
        raise ConfigError(explain("optim.groups", patterns, "freezes every parameter", "leave some to train"))
