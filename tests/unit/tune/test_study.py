"""What Optuna says of trials whose objective is a known function: which fields mattered, how much better a point can be."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.run.report.sweep_page import ticks
from springtide.tune.rank import comparable, fences
from springtide.tune.search import importance, possible_improvement
from springtide.tune.space import Budget, Point, Range, Sweep
from springtide.tune.trial import Rung, TrialOutcome

RATE = Range("optim.peak_lr", "log_uniform", (1e-5, 1e-1))
DECAY = Range("optim.weight_decay", "uniform", (0.0, 1.0))
KIND = Range("model.activation", "choice", ("gelu", "relu", "swiglu", "tanh"))
RUNG = 1000
SWEEP = Sweep((RATE, DECAY, KIND), "heldout_loss", "min", Budget(40, 4 * RUNG))


def drawn(number: int) -> Point:
    chance = random.Random(number)
    return {
        RATE.field: 10 ** chance.uniform(-5, -1),
        DECAY.field: chance.random(),
        KIND.field: chance.choice(KIND.values),
    }


def outcome(number: int, *values: float, status: str = "finished") -> TrialOutcome:
    rungs = tuple(Rung(at, at * RUNG, value) for at, value in enumerate(values, start=1))
    return TrialOutcome(number, drawn(number), status, rungs)


def tried(objective: Callable[[Point], float], trials: int = 40) -> list[TrialOutcome]:
    return [outcome(number, objective(drawn(number))) for number in range(trials)]


def far_from(best: float, scale: float = 1.0) -> Callable[[Point], float]:
    return lambda point: scale * abs(math.log10(point[RATE.field]) - math.log10(best))


WORTH = {"gelu": 2.0, "relu": 5.0, "swiglu": 1.0, "tanh": 4.0}


@pytest.mark.parametrize(
    ("field", "objective"),
    [
        (RATE.field, far_from(3e-3)),
        (RATE.field, far_from(3e-3, 1e300)),
        (DECAY.field, lambda point: point[DECAY.field] - 0.3),
        (KIND.field, lambda point: WORTH[point[KIND.field]]),
    ],
)
def test_a_field_that_does_everything_gets_nearly_all(field: str, objective: Callable[[Point], float]) -> None:
    shares = importance(SWEEP, tried(objective))
    assert list(shares) == [one.field for one in SWEEP.space]
    assert shares.pop(field) > 0.8
    assert max(shares.values()) < 0.08


def test_two_fields_share_what_a_third_has_no_part_in() -> None:
    shares = importance(SWEEP, tried(lambda point: 3 * point[DECAY.field] + WORTH[point[KIND.field]], 80))
    assert shares[KIND.field] > shares[DECAY.field] > 0.15 > 0.03 > shares[RATE.field]
    assert 0.8 < sum(shares.values()) <= 1.0


def test_noise_does_not_hide_the_field_that_mattered() -> None:
    chance = random.Random(0)
    shares = importance(SWEEP, tried(lambda point: far_from(3e-3)(point) + chance.gauss(0, 0.3)))
    assert max(shares, key=shares.__getitem__) == RATE.field
    assert 0.4 < sum(shares.values()) < 1


def test_points_from_a_file_are_those_of_the_space() -> None:
    """A tuple comes back as a list, and a rounded number may be outside of its range by a digit."""
    betas = Range("optim.betas", "choice", ((0.9, 0.95), (0.9, 0.99)))
    rate = Range("optim.peak_lr", "log_uniform", (1.00000049e-5, 1e-1))
    sweep = Sweep((rate, betas), "heldout_loss", "min", Budget(8, 4 * RUNG))
    points = [{rate.field: 1e-5 * 10**number, betas.field: list(betas.values[number % 2])} for number in range(5)]
    outcomes = [TrialOutcome(at, point, "finished", (Rung(1, RUNG, float(at)),)) for at, point in enumerate(points)]
    assert importance(sweep, outcomes)[rate.field] > 0.3
    assert possible_improvement(sweep, [(point, float(at)) for at, point in enumerate(points)]) > 0


def test_a_rate_matters_by_its_logarithm() -> None:
    places = [RATE.place(value) for value in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)]
    assert places == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert DECAY.place(0.25) == 0.25
    betas = Range("optim.betas", "choice", ((0.9, 0.95), (0.9, 0.99)))
    assert (
        betas.place((0.9, 0.99)) == betas.place([0.9, 0.99]) == 0.75
    )  # a tuple is a list when it was read from a file


def test_trials_that_were_stopped_count_and_are_compared_where_all_had_trained_as_long() -> None:
    """The later rungs tell another story, of the few that were good at the first."""
    early = [far_from(3e-3)(drawn(number)) for number in range(40)]
    kept = sorted(range(40), key=early.__getitem__)[:10]
    outcomes = [
        outcome(number, 5 + early[number], 1.0 + drawn(number)[DECAY.field])
        if number in kept
        else outcome(number, 5 + early[number], status="stopped")
        for number in range(40)
    ]
    assert importance(SWEEP, outcomes)[RATE.field] > 0.8
    assert importance(SWEEP, outcomes) == importance(SWEEP, outcomes[::-1])


def test_a_few_that_fell_short_do_not_hold_all_others_back() -> None:
    outcomes = [outcome(number, 5.0, float(number)) for number in range(19)]
    few = [outcome(19, 5.0, math.nan), outcome(20, 5.0, status="failed")]
    assert comparable(SWEEP.budget, [*outcomes, *few]) == {number: float(number) for number in range(19)}
    many = [outcome(number, 3.0, math.inf) for number in range(20, 24)]
    assert comparable(SWEEP.budget, [*outcomes, *many]) == dict.fromkeys(range(19), 5.0) | dict.fromkeys(
        range(20, 24), 3.0
    )


def test_batches_of_different_sizes_meet_at_the_same_rungs() -> None:
    """One evaluated a little before the rung and one a little after it, at quite other steps."""
    small = TrialOutcome(0, drawn(0), "finished", (Rung(120, 960, 3.0), Rung(240, 1920, 2.0)))
    large = TrialOutcome(1, drawn(1), "finished", (Rung(17, 1088, 2.5), Rung(34, 2176, 1.5)))
    assert comparable(SWEEP.budget, [small, large]) == {0: 2.0, 1: 1.5}


def test_one_that_diverged_does_not_outweigh_all_others() -> None:
    outcomes = tried(lambda point: WORTH[point[KIND.field]])
    outcomes[7] = outcome(7, 1e9)
    shares = importance(SWEEP, outcomes)
    assert shares[KIND.field] > 0.2
    assert shares[KIND.field] == max(shares.values())


@pytest.mark.parametrize(
    "outcomes",
    [
        [],
        [outcome(0, 1.0)],
        [outcome(number, float(number)) for number in range(3)],
        [TrialOutcome(number, drawn(0), "finished", (Rung(1, RUNG, float(number)),)) for number in range(30)],
        [outcome(number, 2.5) for number in range(30)],
        [outcome(number, 0.0) for number in range(30)],
        [outcome(number, math.nan) for number in range(30)],
        [outcome(number, math.inf, status="failed") for number in range(30)],
        [outcome(number, status="waiting") for number in range(30)],
    ],
    ids=["none", "one", "three", "one point", "constant", "zero", "nan", "inf", "waiting"],
)
def test_where_nothing_can_be_told_nothing_is(outcomes: list[TrialOutcome]) -> None:
    assert importance(SWEEP, outcomes) == {}


VALUES = st.one_of(st.floats(-1e300, 1e300), st.sampled_from([math.nan, math.inf, -math.inf]))


@settings(max_examples=20)
@given(st.lists(st.lists(VALUES, max_size=4), max_size=12))
def test_whatever_the_trials_came_to_the_shares_are_shares(trials: list[list[float]]) -> None:
    shares = importance(SWEEP, [outcome(number, *values) for number, values in enumerate(trials)])
    assert all(0 <= share <= 1 for share in shares.values())
    assert sum(shares.values()) <= 1 + 1e-9


@given(
    st.sampled_from(["uniform", "log_uniform"]),
    st.floats(1e-9, 1e9),
    st.floats(1.001, 1e6),
)
def test_an_axis_has_its_ends_and_a_few_ticks_apart_between_them(kind: str, low: float, factor: float) -> None:
    one = Range("a", kind, (low, low * factor))
    places = [at for at, _ in ticks(one)]
    assert (places[0], places[-1]) == (0.0, 1.0)
    assert len(places) <= 12
    assert min(np.diff(places)) > 0.05


def test_ticks_are_round_and_of_the_kind_of_the_field() -> None:
    assert [text for _, text in ticks(RATE)] == ["1e-05", "0.0001", "0.001", "0.01", "0.1"]
    assert [text for _, text in ticks(Range("a", "uniform", (2, 12)))] == ["2", "4", "6", "8", "10", "12"]
    assert [text for _, text in ticks(KIND)] == ["gelu", "relu", "swiglu", "tanh"]


def test_fences_keep_what_is_near_and_cut_what_is_far_out() -> None:
    assert fences([1.0, 2.0, 3.0, 4.0, 5.0, 1000.0]) == pytest.approx((1.0, 12.25))
    assert fences([2.0, 2.0, 2.0, 9.0]) == (2.0, pytest.approx(9.0))
    assert fences([3.0]) == (3.0, 3.0)


BOWL = far_from(3e-3)


def gain_after(trials: int, objective: Callable[[Point], float] = BOWL, sweep: Sweep = SWEEP) -> float:
    return possible_improvement(sweep, [(drawn(number), objective(drawn(number))) for number in range(trials)])


def test_what_can_still_be_gained_shrinks_with_the_trials_to_what_is_left() -> None:
    """The least value of the objective is 0, so the gain left is the best value itself."""
    best = [min(far_from(3e-3)(drawn(number)) for number in range(trials)) for trials in (8, 40)]
    bounds = [gain_after(8), gain_after(40)]
    assert bounds[1] < 0.6 * bounds[0]
    assert all(bound > left for bound, left in zip(bounds, best, strict=True))


def test_a_greatest_objective_has_the_same_gain_as_its_negative() -> None:
    greatest = Sweep(SWEEP.space, SWEEP.metric, "max", SWEEP.budget)
    found = gain_after(12, lambda point: -far_from(3e-3)(point), greatest)
    assert found == pytest.approx(gain_after(12), rel=0.05)


def test_the_gain_is_unknown_before_four_points_differ() -> None:
    few = [(drawn(number % 3), 1.0 + number) for number in range(9)]
    assert possible_improvement(SWEEP, few) == math.inf
    assert possible_improvement(SWEEP, [*few, (drawn(3), math.nan), (drawn(4), math.inf)]) == math.inf
    assert possible_improvement(SWEEP, [*few, (drawn(3), 2.0)]) < math.inf


def test_a_diverged_trial_does_not_promise_a_gain() -> None:
    trials = [(drawn(number), far_from(3e-3)(drawn(number))) for number in range(16)]
    assert possible_improvement(SWEEP, [*trials, (drawn(16), 1e9)]) < 3 * possible_improvement(SWEEP, trials)


def test_the_same_trials_get_the_same_answers() -> None:
    assert gain_after(10) == gain_after(10)
    outcomes = tried(far_from(3e-3))
    assert importance(SWEEP, outcomes) == importance(SWEEP, outcomes)
