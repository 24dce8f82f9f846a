"""The state that an optimizer is given to load into is the one that its first step makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from springtide.checkpoint import tensors


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, tuple[torch.dtype, torch.Size, torch.device]]]:
    return [
        {name: (one.dtype, one.shape, one.device) for name, one in optimizer.state[parameter].items()}
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"amsgrad": True}])
def test_plain_adamw_gets_it_without_a_step(monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]) -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.AdamW(nn.Linear(3, 2).parameters(), **options)

    stepped, given = optimizer(), optimizer()
    monkeypatch.setattr(tensors, "_has_hooks", lambda optimizer: True)
    tensors.materialize(stepped)
    monkeypatch.setattr(tensors, "_has_hooks", lambda optimizer: False)
    tensors.materialize(given)
    assert states(given) == states(stepped)


def test_what_hooks_add_is_made_by_a_step() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    add: Callable[..., None] = lambda mine, *_: mine.state[model.weight].update(average=torch.ones(()))  # noqa: E731
    optimizer.register_step_post_hook(add)
    tensors.materialize(optimizer)
    assert "average" in optimizer.state[model.weight]
