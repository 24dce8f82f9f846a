"""On-demand nodes beside spot nodes: a deadline is met, and no more is rented than that needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from springtide.elastic.market import (
    Deadline,
    MarketOutcome,
    MarketSimulation,
    Rented,
    Rule,
    always_full,
    never,
    uniform_progress,
    until_the_last,
)
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs
from springtide.elastic.traces import of_numbers

HOUR = 3600.0
ORDER_S = 120.0
COSTS = Costs(step_s=5.0)
LOSS_S = COSTS.restart_s + 2 * COSTS.step_s


def plan_of(work_h: float, deadline_h: float, workers: int = 8, lanes: int = 0) -> Deadline:
    change_s = ORDER_S + COSTS.warm_up_s + COSTS.restart_s
    return Deadline(work_h * workers * HOUR, deadline_h * HOUR, workers, change_s, LOSS_S, lanes)


def simulated(spot: Sequence[int], plan: Deadline, rule: Rule = uniform_progress) -> MarketSimulation:
    """A run with as many spot nodes in each half hour as ``spot`` says, again and again."""
    ticks = [(HOUR / 2 * tick, spot[tick % len(spot)]) for tick in range(96)]
    bounds = Bounds(1, plan.workers, lanes=plan.lanes)
    return MarketSimulation(of_numbers(ticks, HOUR / 2), bounds, COSTS, plan, rule, ORDER_S)


def outcome(spot: Sequence[int], plan: Deadline, rule: Rule = uniform_progress) -> MarketOutcome:
    return simulated(spot, plan, rule).outcome_of_run()


@given(
    some.integers(0, 12), some.integers(0, 12), some.floats(0.0, 1.0), some.floats(0.0, 1.2), some.sampled_from([0, 24])
)
def test_no_rule_rents_more_than_the_group_needs_and_all_of_it_when_slack_ends(
    spot: int, on_demand: int, done: float, now: float, lanes: int
) -> None:
    plan, rented = plan_of(10.0, 13.0, lanes=lanes), Rented(spot, on_demand)
    at = (done * plan.work, now * plan.deadline_s)
    for rule in (uniform_progress, until_the_last, always_full, never):
        assert 0 <= rule(plan, rented, *at).on_demand <= plan.workers
    if plan.slack_s(*at) < 2 * plan.change_s:
        for rule in (uniform_progress, until_the_last):
            assert spot + rule(plan, rented, *at).on_demand >= plan.workers


def test_on_demand_nodes_stay_as_far_as_they_keep_the_pace_and_one_goes_if_the_lead_is_long() -> None:
    plan = plan_of(10.0, 20.0)
    pace = plan.work / plan.deadline_s
    leads_s = (-60.0, 60.0, 2 * plan.change_s + 60.0)
    found = {
        held: [
            uniform_progress(plan, Rented(2, held), pace * (4 * HOUR + lead_s), 4 * HOUR).on_demand
            for lead_s in leads_s
        ]
        for held in (0, 3)
    }
    assert found == {0: [3, 0, 0], 3: [3, 2, 1]}  # four workers keep the pace, and one more makes up for the changeover


def test_whole_lanes_need_more_workers_for_the_same_pace() -> None:
    """With 8 lanes, 5 to 7 workers are no faster than 4."""
    for lanes, workers in ((0, 5), (8, 8)):
        plan = plan_of(10.0, 18.0, lanes=lanes)
        assert uniform_progress(plan, Rented(0, 0), 0.0, 60.0).on_demand == workers


@settings(max_examples=8, deadline=None)
@given(some.lists(some.integers(0, 8), min_size=1, max_size=16), some.sampled_from([1.2, 1.5, 2.5]))
def test_uniform_progress_meets_the_deadline_whatever_the_record(spot: list[int], factor: float) -> None:
    plan = plan_of(8.0, 8.0 * factor)
    assert outcome(spot, plan).finish_s <= plan.deadline_s


def test_spot_nodes_that_suffice_are_all_that_is_rented() -> None:
    found = outcome([6], plan_of(8.0, 12.0))
    assert (found.on_demand_s, found.orders) == (0.0, 0)
    assert found.finish_s == pytest.approx(8 * 8 * HOUR / 6, rel=0.01)


def test_without_spot_nodes_it_needs_what_the_work_takes_on_demand() -> None:
    plan = plan_of(8.0, 16.0)
    found = outcome([0], plan)
    assert found.finish_s <= plan.deadline_s
    assert found.spot_s == 0
    assert found.on_demand_s == pytest.approx(plan.work, rel=0.05)
    assert math.isinf(outcome([0], plan, never).finish_s)


def test_what_it_gives_back_loses_no_step() -> None:
    run = simulated([8, 0, 0], plan_of(8.0, 14.0))
    found = run.outcome_of_run()
    assert found.orders > 8
    assert found.finish_s <= 14 * HOUR
    assert run.outcome.recomputed == 0.0
    assert run.outcome.productive == pytest.approx(8 * 8 * HOUR, rel=1e-6)


def test_it_costs_less_than_filling_up_and_is_no_later_than_the_deadline_where_spot_nodes_are_rare() -> None:
    plan = plan_of(8.0, 12.0)
    found = {rule: outcome([8, 8, 1, 0, 0, 4], plan, rule) for rule in (uniform_progress, always_full)}
    assert found[uniform_progress].on_demand_s < found[always_full].on_demand_s
    assert found[uniform_progress].finish_s <= plan.deadline_s
