"""Which trial is best: by one objective, by two, by several seeds; and whether another would be worth its price."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide import config as configs
from springtide.errors import ConfigError
from springtide.tune import Rung, TrialOutcome, other_seed, rank_trials, read, words

TINY = configs.recipes.tiny()
TABLE = {
    "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1), "stream.global_batch": ("choice", 12, 48)},
    "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
    "BUDGET": {"trials": 8, "tokens_per_trial": 40_000, "rungs": 4},
}
BOTH = {**TABLE, "OBJECTIVE": {**TABLE["OBJECTIVE"], "secondary": {"metric": "step_worker_s", "mode": "min"}}}


def outcome(
    number: int, value: float, secondary: float = math.nan, repeats: int = -1, tokens: int = 40_000
) -> TrialOutcome:
    rungs = (Rung(tokens // 100, tokens, value),)
    return TrialOutcome(number, {"optim.peak_lr": 0.01}, "finished", rungs, secondary=secondary, repeats=repeats)


def test_trials_whose_batches_differ_are_compared_after_the_same_tokens() -> None:
    small = TrialOutcome(0, {}, "finished", (Rung(977, 40_000, 3.0),))
    large = TrialOutcome(1, {}, "finished", (Rung(123, 39_936, 2.0),))
    early = TrialOutcome(2, {}, "stopped", (Rung(30, 10_000, 1.0),))
    assert rank_trials(read(TABLE, TINY), [small, large, early]).best is large


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_the_front_is_those_that_no_other_beats(pairs: list[tuple[int, int]]) -> None:
    sweep = read(BOTH, TINY)
    outcomes = [outcome(number, float(value), float(cost)) for number, (value, cost) in enumerate(pairs)]
    verdict = rank_trials(sweep, outcomes)
    points = {(one.value, one.secondary) for one in outcomes}
    beaten = {p for p in points for q in points if q != p and q[0] <= p[0] and q[1] <= p[1]}
    assert {(one.value, one.secondary) for one in verdict.front} == points - beaten
    assert len(verdict.front) == len(points - beaten)
    assert verdict.front[0].value == verdict.best.value  # type: ignore[union-attr]
    assert all(one.name in words(sweep, verdict) for one in verdict.front)


def test_several_seeds_tell_luck_from_a_better_point() -> None:
    lucky, sound = outcome(0, 2.0), outcome(1, 2.1)
    again = [outcome(8, 2.6, repeats=0), outcome(9, 2.7, repeats=0), outcome(10, 2.1, repeats=1)]
    again.append(outcome(11, 2.2, repeats=1))
    verdict = rank_trials(read(TABLE, TINY), [lucky, sound, *again])
    assert verdict.best is sound
    assert [final.number for final in verdict.finals] == [1, 0]
    assert verdict.finals[1].values == (2.0, 2.6, 2.7)
    assert verdict.finals[1].mean == pytest.approx(statistics.fmean((2.0, 2.6, 2.7)))
    assert verdict.finals[1].deviation == pytest.approx(statistics.stdev((2.0, 2.6, 2.7)))
    assert "2.1333 ± 0.0577" in words(read(TABLE, TINY), verdict)


def reached(number: int, value: float, rungs: int, status: str = "finished", repeats: int = -1) -> TrialOutcome:
    """A trial that was evaluated at ``rungs`` of four rungs, a loss of 1 apart, and would end with ``value``."""
    found = tuple(Rung(100 * rung, 10_000 * rung, value + 4.0 - rung) for rung in range(1, rungs + 1))
    return TrialOutcome(number, {}, status, found, repeats=repeats)


def test_repeats_that_did_not_come_as_far_do_not_count() -> None:
    first = [reached(0, 2.0, 4), reached(1, 2.1, 4), reached(2, 5.0, 2, "stopped")]
    cut = [reached(4, 2.0, 2, "stopped", 0), reached(5, 2.0, 2, "stopped", 0), reached(6, 2.1, 2, "stopped", 1)]
    verdict = rank_trials(read(TABLE, TINY), [*first, *cut], chosen=[0, 1])
    assert (verdict.best, verdict.finals) == (first[0], ())


def test_finalists_decide_when_all_of_them_have_their_seeds() -> None:
    table = read(TABLE, TINY)
    first, lucky = reached(0, 2.0, 4), reached(1, 2.1, 4)
    of_first = [reached(8, 2.3, 4, repeats=0), reached(9, 2.4, 4, repeats=0)]
    verdict = rank_trials(table, [first, lucky, *of_first], chosen=[0, 1])
    assert [final.number for final in verdict.finals] == [0]
    assert verdict.best is first, "by its first seed: the other finalist has no other"
    for of_lucky in (
        [reached(10, 2.2, 4, repeats=1)],
        [reached(10, 2.2, 4, repeats=1), reached(11, 2.0, 3, "stopped", 1)],
    ):
        assert rank_trials(table, [first, lucky, *of_first, *of_lucky], chosen=[0, 1]).best is first
    of_lucky = [reached(10, 2.2, 4, repeats=1), reached(11, 2.0, 3, "failed", 1)]
    assert rank_trials(table, [first, lucky, *of_first, *of_lucky], chosen=[0, 1]).best is lucky


def test_a_finalist_whose_other_seeds_failed_is_compared_by_its_first() -> None:
    first, second = reached(0, 2.0, 4), reached(1, 9.1, 4)
    again = [reached(8, 9.0, 4, repeats=1), reached(9, 9.0, 4, repeats=1)]
    failed = [reached(6, math.nan, 0, "failed", 0), reached(7, math.inf, 4, repeats=0)]
    verdict = rank_trials(read(TABLE, TINY), [first, second, *failed, *again], chosen=[0, 1])
    assert verdict.best is first
    assert [final.number for final in verdict.finals] == [1]


def test_other_seeds_are_of_weights_and_of_samples() -> None:
    point = other_seed(TINY, {"optim.peak_lr": 0.01}, 2)
    config = TINY.override(point)
    assert config.model.init_seed == TINY.model.init_seed + 2
    assert config.stream.seed == TINY.stream.seed + 2


@pytest.mark.parametrize(
    ("objective", "match"),
    [
        ({"metric": "speed", "mode": "min"}, r"OBJECTIVE\.secondary\.metric = 'speed'.*step_worker_s"),
        ({"metric": "memory_bytes", "mode": "least"}, r"OBJECTIVE\.secondary\.mode = 'least'"),
        ("step_worker_s", r"OBJECTIVE\.secondary = 'step_worker_s': is not a table"),
    ],
)
def test_a_second_objective_is_checked_like_the_first(objective: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read({**TABLE, "OBJECTIVE": {**TABLE["OBJECTIVE"], "secondary": objective}}, TINY)
