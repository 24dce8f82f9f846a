"""Points are drawn before anything runs, from what the config takes."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide import config as configs
from springtide.errors import ConfigError
from springtide.tune import (
    Point,
    Rung,
    Search,
    TrialOutcome,
    grid_points,
    random_points,
    rank_trials,
    read,
    search_of,
    trial_config,
    words,
)

TINY = configs.recipes.tiny()
STEP = TINY.tokens_per_step
TABLE = {
    "SPACE": {
        "optim.peak_lr": ("log_uniform", 1e-4, 1e-1),
        "model.num_layers": ("uniform", 1, 4),
        "stream.lanes": ("choice", 3, 4),
    },
    "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
    "BUDGET": {"trials": 8, "tokens_per_trial": 40 * STEP, "rungs": 4},
}


@given(st.integers(0, 10**6))
def test_random_points_lie_in_the_space(seed: int) -> None:
    """Random points lie in the space and do not depend on how many there are."""
    sweep = read(TABLE, TINY)
    points = random_points(sweep, TINY, seed)
    assert len(points) == 8
    for point in points:
        assert 1e-4 <= point["optim.peak_lr"] <= 1e-1
        assert point["model.num_layers"] in {1, 2, 3, 4}
        assert point["stream.lanes"] in {3, 4}
    fewer = read({**TABLE, "BUDGET": {**TABLE["BUDGET"], "trials": 3}}, TINY)
    assert random_points(fewer, TINY, seed) == points[:3]


def test_random_points_of_few_choices_are_distinct_while_there_are_others() -> None:
    table = {**TABLE, "SPACE": {"optim.peak_lr": ("choice", 1e-3, 2e-3, 3e-3), "stream.lanes": ("choice", 3, 4)}}
    sweep = read(table, TINY)
    points = random_points(sweep, TINY, 0)
    assert len(points) == 8
    assert len({tuple(point.values()) for point in points[:6]}) == 6, "all six combinations come before a second one"
    assert points[0] == random_points(sweep, TINY, 0, distinct=False)[0]
    before = random_points(sweep, TINY, 0, distinct=False)
    assert len({tuple(point.values()) for point in before}) < 6, "a sweep from before keeps the points that it drew"
    search = search_of("random", sweep, TINY, 0, [], distinct=False)
    assert [search.ask(number) for number in range(8)] == before


def test_a_grid_has_every_combination_the_config_and_where_take() -> None:
    table = {**TABLE, "BUDGET": {**TABLE["BUDGET"], "trials": 100}}
    points = grid_points(read(table, TINY), TINY)
    assert len(points) == 3 * 3 * 2
    assert sorted({point["optim.peak_lr"] for point in points}) == pytest.approx([1e-4, 10**-2.5, 1e-1], rel=1e-5)
    fewer = grid_points(read({**table, "WHERE": lambda point: point["stream.lanes"] == 4}, TINY), TINY)
    assert fewer == [point for point in points if point["stream.lanes"] == 4]
    with pytest.raises(ConfigError, match="WHERE"):
        grid_points(read({**table, "WHERE": lambda point: False}, TINY), TINY)
    with pytest.raises(ConfigError, match="100 draws"):
        random_points(read({**table, "WHERE": lambda point: False}, TINY), TINY, 0)


def test_a_trial_is_judged_at_its_rungs() -> None:
    """A trial is as long as the budget says and is judged at its rungs."""
    sweep = read(TABLE, TINY)
    config = trial_config(TINY, sweep.budget, "trial-0003", {"optim.peak_lr": 0.01})
    assert (config.run.id, config.num_steps, config.train.eval_every) == ("trial-0003", 40, 10)
    assert config.optim.peak_lr == 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"OBJECTIVE": {"metric": "heldout_los", "mode": "min"}}, "did you mean 'heldout_loss'"),
        ({"OBJECTIVE": {"metric": "loss", "mode": "least"}}, "OBJECTIVE.mode = 'least'"),
        ({"SPACE": {}}, "names no field"),
        ({"SPACE": None}, "SPACE = None: is not a table"),
        ({"BUDGET": {"trails": 3}}, "did you mean 'trials'"),
        ({"BUDGET": {"trials": 0, "tokens_per_trial": 10**6}}, "BUDGET.trials = 0"),
        ({"BUDGET": {"trials": 3, "tokens_per_trial": STEP}}, "is too small for 4 rungs of one step each"),
        ({"BUDGET": {"trials": 3, "tokens_per_trial": 400 * STEP, "tokens": 9}}, "less than one rung of one trial"),
        ({"BUDGET": {"trials": 3, "tokens_per_trial": "many"}}, "must be a number"),
    ],
)
def test_what_is_wrong_with_a_table_is_told(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({**TABLE, **changes}, TINY)


def test_the_best_is_among_those_that_came_furthest() -> None:
    """The best is of those that came furthest and a failure is none."""
    sweep = read(TABLE, TINY)

    def rungs(*values: float) -> tuple[Rung, ...]:
        return tuple(Rung(10 * number, 10 * number * STEP, value) for number, value in enumerate(values, start=1))

    outcomes = [
        TrialOutcome(0, {"optim.peak_lr": 0.1}, "stopped", rungs(1.0), worker_s=2.0),
        TrialOutcome(1, {"optim.peak_lr": 0.01}, "finished", rungs(3.0, 2.5), worker_s=4.0),
        TrialOutcome(2, {"optim.peak_lr": 0.02}, "finished", rungs(3.5, 2.0), worker_s=4.0),
        TrialOutcome(3, {"optim.peak_lr": 0.5}, "failed", rungs(9.0, math.inf), reason="it diverged"),
        TrialOutcome(4, {"optim.peak_lr": 0.3}, "waiting"),
    ]
    verdict = rank_trials(sweep, outcomes)
    assert verdict.best is outcomes[2]
    assert verdict.worker_s == 10.0
    told = words(sweep, verdict)
    assert "* trial-0002" in told
    assert "failed: it diverged" in told
    assert rank_trials(sweep, outcomes[3:]).best is None


def tried(search: Search, objective: Callable[[Point], float], trials: range, told: dict[int, float]) -> list[Point]:
    """What a search asks for when it is told the objective of each, or what it was told before."""
    points = []
    for number in trials:
        point = search.ask(number)
        assert point is not None
        points.append(point)
        search.tell(number, [told.setdefault(number, objective(point))])
    return points


def test_tpe_resumes_with_the_same_questions() -> None:
    """TPE looks where it was good and one that is resumed asks for the same and goes on."""
    table = {**TABLE, "BUDGET": {**TABLE["BUDGET"], "trials": 40}}
    sweep = read(table, TINY)

    def objective(point: Point) -> float:
        return abs(math.log10(point["optim.peak_lr"]) + 2.0) + 0.1 * point["model.num_layers"]

    told: dict[int, float] = {}
    points = tried(search_of("tpe", sweep, TINY, 0, []), objective, range(40), told)
    assert len({str(point) for point in points[:10]}) == 10
    assert search_of("tpe", sweep, TINY, 0, []).ask(40) is None
    random = [objective(point) for point in random_points(sweep, TINY, 0)]
    assert statistics.median(told[number] for number in range(30, 40)) < 0.6 * statistics.median(random)

    again = search_of("tpe", sweep, TINY, 0, points[:25])
    assert tried(again, objective, range(25), told) == points[:25]
    assert tried(again, objective, range(25, 40), {}) == points[25:], "its points depend on the results alone"
    other = search_of("tpe", sweep, TINY, 1, [])
    assert tried(other, objective, range(12), {}) != points[:12]


def test_a_tpe_keeps_away_from_points_that_are_being_tried() -> None:
    sweep = read({**TABLE, "BUDGET": {**TABLE["BUDGET"], "trials": 40}}, TINY)
    search = search_of("tpe", sweep, TINY, 0, [])
    tried(search, lambda point: point["optim.peak_lr"], range(20), {})
    beside = [search.ask(number) for number in range(20, 26)]
    assert len({str(point) for point in beside}) == 6
    again = search_of("tpe", sweep, TINY, 0, [])
    told: dict[int, float] = {}
    tried(again, lambda point: point["optim.peak_lr"], range(20), told)
    assert [again.ask(number) for number in range(20, 26)] == beside
    for number in range(20, 26):
        again.tell(number, None)  # all failed
    assert again.ask(26) != search.ask(26), "those that run count"


def test_a_tpe_answers_alike_in_whatever_order_results_came() -> None:
    sweep = read({**TABLE, "BUDGET": {**TABLE["BUDGET"], "trials": 40}}, TINY)
    found = []
    for order in (range(20), reversed(range(20))):
        search = search_of("tpe", sweep, TINY, 0, random_points(sweep, TINY, 5)[:20])
        points = [search.ask(number) or {} for number in range(20)]
        for number in order:
            search.tell(number, [points[number]["optim.peak_lr"]])
        found.append(search.ask(20))
    assert found[0] == found[1]


def test_a_tpe_that_is_resumed_knows_choices_that_are_tuples() -> None:
    pytest.importorskip("optuna")
    betas = ("choice", (0.9, 0.95), (0.9, 0.99))
    sweep = read({**TABLE, "SPACE": {"optim.betas": betas, "optim.peak_lr": ("uniform", 0.01, 0.02)}}, TINY)
    first = search_of("tpe", sweep, TINY, 0, [])
    points = [first.ask(number) for number in range(3)]
    from_file = json.loads(json.dumps(points))
    again = search_of("tpe", sweep, TINY, 0, from_file)
    assert [again.ask(number) for number in range(3)] == points
    again.tell(0, [2.0])
    assert again.ask(3) is not None


def test_a_tpe_whose_draws_are_all_refused_draws_at_random() -> None:
    pytest.importorskip("optuna")
    asked = itertools.count()
    sweep = read({**TABLE, "WHERE": lambda point: next(asked) >= 100}, TINY)
    search = search_of("tpe", sweep, TINY, 0, [])
    assert search.ask(0) == random_points(read(TABLE, TINY), TINY, 0)[0]
    search.tell(0, [2.0])
    assert search.ask(1) is not None


def test_a_tpe_whose_where_accepts_nothing_says_so() -> None:
    pytest.importorskip("optuna")
    search = search_of("tpe", read({**TABLE, "WHERE": lambda point: False}, TINY), TINY, 0, [])
    with pytest.raises(ConfigError, match=r"100 draws.*WHERE"):
        search.ask(0)


def test_a_search_that_is_not_known_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'random'"):
        search_of("rando", read(TABLE, TINY), TINY, 0, [])
