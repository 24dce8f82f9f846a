"""Held-out figures have the same bits at any world size, and those of a checkpoint are those of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loops import evaluate_new_model, train

from springtide.checkpoint.format import name_of
from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.events import Evaluated
from springtide.storage import Folder
from springtide.training.evaluate import evaluate_checkpoint

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]


def test_figures_have_the_same_bits_at_any_world_size(tiny: Config, poems: str, ranks: Ranks) -> None:
    mixture = {"code": tiny.shards.dataset, "poems": poems}
    changes = {"stream.mixture": mixture, "train.eval_tokens": 22 * 64, "train.micro_batch": 4}
    found = {size: ranks(size, evaluate_new_model, tiny.override(changes)) for size in (1, 2, 3)}
    figures = [(one.heldout_loss, one.heldout_bits_per_byte, one.losses) for of in found.values() for one in of]
    assert figures == figures[:1] * 6
    assert found[1][0].rows == 22


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_is_evaluated_in_the_precision_of_training(tiny: Config, ranks: Ranks, precision: str) -> None:
    changes = {
        "run.id": precision,
        "parallel.precision": precision,
        "train.total": 4 * 12 * 64,
        "optim.warmup": 0,
        "train.sample_tokens": 0,
    }
    [events] = ranks(1, train, tiny.override(changes))
    trained = [event for event in events if isinstance(event, Evaluated)][-1]
    assert trained.step == 4
    config = tiny.override(changes)
    found = evaluate_checkpoint(Folder(config.run.root) / config.run.id, config, name_of(StepsDone(4)))
    assert (found.heldout_loss, found.heldout_bits_per_byte) == (trained.heldout_loss, trained.heldout_bits_per_byte)
