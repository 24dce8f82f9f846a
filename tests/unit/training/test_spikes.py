"""What counts as a spike."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.training.step_guard import Spikes


def usual(steps: int, seed: int = 0) -> list[tuple[float, float]]:
    """A loss that falls and a norm with a heavy tail, as in training."""
    chance = random.Random(seed)
    return [(4.0 - 0.01 * step + chance.gauss(0, 0.1), chance.lognormvariate(0, 0.3)) for step in range(steps)]


def seen(steps: int, seed: int = 0) -> Spikes:
    spikes = Spikes(64, 12.0)
    for loss, norm in usual(steps, seed):
        spikes.remember(loss, norm)
    return spikes


def test_training_as_usual_has_none() -> None:
    spikes = Spikes(64, 12.0)
    for loss, norm in usual(300):
        assert spikes.find(loss, norm) is None
        spikes.remember(loss, norm)


@pytest.mark.parametrize(
    ("loss", "norm", "what"), [(7.0, 1.0, "loss"), (3.5, 80.0, "gradient norm"), (float("nan"), 1.0, "loss")]
)
def test_a_step_far_above_the_others_is_one_and_says_what(loss: float, norm: float, what: str) -> None:
    found = seen(64).find(loss, norm)
    assert found is not None
    assert found.what == what
    assert found.usual == pytest.approx(3.4 if what == "loss" else 1.0, abs=0.3)


def test_a_loss_that_falls_fast_hides_no_spike() -> None:
    spikes = Spikes(64, 12.0)
    for step in range(40):
        spikes.remember(6.0 - 0.08 * step, 1.0)
    assert spikes.find(6.0 - 0.08 * 40, 1.0) is None
    assert spikes.find(5.5, 1.0) is not None  # lower than where it began


def test_a_fall_is_none_nor_is_anything_among_the_first_steps() -> None:
    assert seen(64).find(0.5, 1e-6) is None
    assert seen(15).find(1e9, 1e9) is None
    assert seen(16).find(1e9, 1e9) is not None


def test_a_loss_that_hardly_moves_may_move_a_little() -> None:
    spikes = Spikes(64, 12.0)
    for _ in range(64):
        spikes.remember(2.0, 1.0)
    assert spikes.find(2.1, 1.05) is None
    assert spikes.find(2.5, 1.0) is not None


@given(st.integers(0, 100), st.floats(0.1, 50), st.floats(0.01, 500))
def test_a_run_that_goes_on_finds_what_the_uninterrupted_one_does(steps: int, loss: float, norm: float) -> None:
    before, after = seen(steps), Spikes(64, 12.0)
    after.load(json.loads(json.dumps(before.state())))
    assert after.find(loss, norm) == before.find(loss, norm)
