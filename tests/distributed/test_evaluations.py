"""Held-out figures have the same bits at any world size, and those of a checkpoint are those of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loops import evaluate_new_model, train
from ranks import run_here

from springtide.checkpoint.format import name_of
from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.events import Evaluated
from springtide.storage import Folder
from springtide.training.evaluate import evaluate_checkpoint

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_figures_have_the_same_bits_at_any_world_size(tiny: Config, poems: str, ranks: Ranks, world_size: int) -> None:
    mixture = {"code": tiny.shards.dataset, "poems": poems}
    changes = {"stream.mixture": mixture, "train.eval_tokens": 22 * 64, "train.micro_batch": 4}
    alone = run_here(evaluate_new_model, tiny.override(changes))
    everyone = [alone, *ranks(world_size, evaluate_new_model, tiny.override(changes))]
    figures = [(one.heldout_loss, one.heldout_bits_per_byte, one.losses) for one in everyone]
    assert figures == figures[:1] * (1 + world_size)
    assert alone.rows == 22


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_is_evaluated_in_the_precision_of_training(tiny: Config, ranks: Ranks, precision: str) -> None:
    changes = {
        "run.id": precision,
        "parallel.precision": precision,
        "train.total": 4 * 12 * 64,
        "optim.warmup": 0,
        "train.sample_tokens": 0,
    }
    events = run_here(train, tiny.override(changes))
    trained = [event for event in events if isinstance(event, Evaluated)][-1]
    assert trained.step == 4
    config = tiny.override(changes)
    found = evaluate_checkpoint(Folder(config.run.root) / config.run.id, config, name_of(StepsDone(4)))
    assert (found.heldout_loss, found.heldout_bits_per_byte) == (trained.heldout_loss, trained.heldout_bits_per_byte)
