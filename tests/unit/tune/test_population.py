"""Members of a population: which fields may change, and how far."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide import config as configs
from springtide.errors import ConfigError
from springtide.tune import (
    check_population,
    clamped,
    point_at,
    random_points,
    read,
    shares,
)

TINY = configs.recipes.tiny()
STEP = TINY.tokens_per_step
TABLE = {
    "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1), "optim.warmup": ("uniform", 0, 10)},
    "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
    "BUDGET": {"trials": 4, "tokens_per_trial": 40 * STEP, "rungs": 4},
}


@given(st.integers(0, 10**6))
def test_a_point_comes_back_from_its_shares(seed: int) -> None:
    sweep = read(TABLE, TINY)
    for point in random_points(sweep, TINY, seed):
        found = shares(sweep, point)
        assert all(0 <= share <= 1 for share in found.values())
        again = point_at(sweep, found)
        assert again["optim.warmup"] == point["optim.warmup"]
        assert again["optim.peak_lr"] == pytest.approx(point["optim.peak_lr"], rel=1e-5)


def test_what_was_changed_too_far_is_brought_back_into_the_space() -> None:
    sweep = read(TABLE, TINY)
    assert clamped(sweep, {"optim.peak_lr": 0.5, "optim.warmup": 12.0}) == {"optim.peak_lr": 0.1, "optim.warmup": 10}
    assert clamped(sweep, {"optim.peak_lr": 1e-9, "optim.warmup": 3}) == {"optim.peak_lr": 1e-4, "optim.warmup": 3}
    assert point_at(sweep, {"optim.peak_lr": 1.2, "optim.warmup": -0.1}) == {"optim.peak_lr": 0.1, "optim.warmup": 0}


def test_a_bound_that_is_written_as_an_integer_makes_no_integers_of_fractions() -> None:
    space = {"optim.weight_decay": ("uniform", 0, 0.3), "optim.peak_lr": ("log_uniform", 1e-4, 1)}
    sweep = read({**TABLE, "SPACE": {**space, "optim.warmup": ("uniform", 0, 10)}}, TINY)
    point = {"optim.weight_decay": 0.12, "optim.peak_lr": 0.003, "optim.warmup": 4.8}
    assert clamped(sweep, point) == {**point, "optim.warmup": 5}
    assert clamped(sweep, {**point, "optim.weight_decay": -1.0})["optim.weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("space", "trials", "scheduler", "match"),
    [
        ({"model.num_layers": ("uniform", 1, 4)}, 4, "pbt", r"model\.num_layers.*cannot change while a trial trains"),
        ({"optim.optimizer": ("choice", "adamw", "muon")}, 4, "pbt", r"optim\.optimizer.*cannot change"),
        ({"optim.peak_lr": ("choice", 0.1, 0.2)}, 4, "pb2", r"is a choice, and pb2 takes only ranges"),
        ({"optim.peak_lr": ("uniform", 0.1, 0.2)}, 1, "pbt", r"BUDGET\.trials = 1: is too few for a population"),
    ],
)
def test_what_no_population_can_be_is_refused(space: object, trials: int, scheduler: str, match: str) -> None:
    table = {**TABLE, "SPACE": space, "BUDGET": {**TABLE["BUDGET"], "trials": trials}}
    with pytest.raises(ConfigError, match=match):
        check_population(read(table, TINY), scheduler)
