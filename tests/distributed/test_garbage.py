"""What a collective returns that was aborted is never trained on, and its group can be left without waiting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from garbage import aborted, evaluate_with_garbage, train_with_garbage

from springtide.config import Config

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]


@pytest.fixture
def short(tiny: Config) -> Config:
    """Four steps."""
    changes = {"run.id": "garbage", "train.total": 4 * 12 * 64, "optim.warmup": 0, "train.eval_tokens": 0}
    return tiny.override(changes)


@pytest.mark.parametrize("how", ["nothing summed", "half summed", "no numbers", "one value"])
def test_garbage_in_the_steps_message_changes_nothing_and_is_named(short: Config, ranks: Ranks, how: str) -> None:
    for kind, raised, told, same in ranks(2, train_with_garbage, short, 3, how):
        assert kind == "CollectiveError"
        assert "canaries are not 2" in raised
        assert told == [1, 2]
        assert same


def test_who_is_cut_off_in_a_collective_uses_nothing_of_it_however_right_it_looks(short: Config, ranks: Ranks) -> None:
    for kind, raised, told, same in ranks(2, train_with_garbage, short, 3, "cut off"):
        assert kind == "CutOff"
        assert "was cut off" in raised
        assert told == [1, 2]
        assert same


def test_a_heldout_loss_of_garbage_is_told_to_nobody(short: Config, ranks: Ranks) -> None:
    config = short.override({"train.eval_tokens": 4 * 64})
    for kind, told in ranks(2, evaluate_with_garbage, config):
        assert kind == "CollectiveError"
        assert "evaluated" not in told


def test_a_group_that_was_aborted_by_torch_is_left_and_the_process_joins_another(tmp_path: Path, ranks: Ranks) -> None:
    *waited, (ran, raised, gone, total) = ranks(3, aborted, str(tmp_path))
    assert (ran, raised, gone, total) == (False, "", True, 3.0)
    for ran, raised, gone, total in waited:
        assert ran
        assert raised
        assert gone
        assert total == 3.0
