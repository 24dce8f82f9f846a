"""What a collective returns that was aborted is never trained on, and its group can be left without waiting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from garbage import aborted, evaluate_with_garbage, train_with_garbage
from ranks import each

from springtide.config import Config

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]


@pytest.fixture
def short(tiny: Config) -> Config:
    """Four steps."""
    changes = {"run.id": "garbage", "train.total": 4 * 12 * 64, "optim.warmup": 0, "train.eval_tokens": 0}
    return tiny.override(changes)


def test_what_an_aborted_collective_returns_changes_nothing_and_is_named(short: Config, ranks: Ranks) -> None:
    """In the step's message, in the sums of held-out losses, and where the sums look right but the rank was cut off."""
    hows = ["nothing summed", "half summed", "no numbers", "one value", "cut off"]
    calls: list[Any] = [
        (train_with_garbage, (short.override({"run.id": how.replace(" ", "-")}), 3, how)) for how in hows
    ]
    evaluated = short.override({"train.eval_tokens": 4 * 64})
    for *trained, cut_off, (kind, told) in ranks(2, each, [*calls, (evaluate_with_garbage, (evaluated,))]):
        for error, raised, steps, same in trained:
            assert (error, steps, same) == ("CollectiveError", [1, 2], True)
            assert "canaries are not 2" in raised
        assert cut_off[0] == "CutOff"
        assert "was cut off" in cut_off[1]
        assert cut_off[2:] == ([1, 2], True)
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
