"""A step that has nothing to learn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_here

from springtide.config import Config
from springtide.distributed import World
from springtide.errors import TrainingFailed
from springtide.model import build
from springtide.training.part import StepResult, Work
from springtide.training.step import StepSetup, train_step

SHAPE = {"model.num_layers": 1, "model.dim": 16, "model.num_heads": 2, "model.num_kv_heads": 2, "model.ffn_dim": 24}


def step_over(world: World, rows_NL: torch.Tensor, **work: Any) -> StepResult:
    model = build(Config().override(SHAPE).model, 61)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return train_step(StepSetup(model, optimizer, world, clip_norm=1.0), Work(rows_NL, [slice(0, 2)], 24, **work))


@pytest.mark.parametrize("rows", [0, 2], ids=["no row", "masked rows"])
def test_a_step_without_a_predicted_token_names_what_to_skip(rows: int) -> None:
    """A step without a predicted token says which and what to skip."""
    masked = ~torch.ones(rows, 13, dtype=torch.int64)
    with pytest.raises(TrainingFailed, match=r"step 7 .*stream\.skip"):
        run_here(step_over, masked, name="step 7 of the order")
