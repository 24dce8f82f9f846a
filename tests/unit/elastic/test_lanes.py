"""Whole lanes: sizes are compared by what a step takes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as some

from springtide.elastic.forecast import RestartForecast
from springtide.elastic.group_sizes import evenness, lane_evenness, more_even, most_lanes, speed
from springtide.elastic.policy import Bounds, Decision, Leave, Node, PolicyState, Stay, WorkerGroup, decide

HOUR = 3600.0


def of_growth(bounds: Bounds, workers: int, nodes: int, restart_s: float = 20.0) -> Decision:
    """What is decided when a group of ``workers`` could have ``nodes``, for long."""
    names = [f"{one:05}" for one in range(nodes)]
    here, group = [Node(name, 1) for name in names], WorkerGroup(tuple(names[:workers]))
    prospects = RestartForecast(restart_s, step_s=10.0)
    _, memory = decide(bounds, here, group, prospects, PolicyState(held=frozenset(names[:workers])), 0.0)
    return decide(bounds, here, group, prospects, memory, 10.0)[0]


def test_a_restart_that_changes_no_step_time_is_not_made() -> None:
    bounds = Bounds(1, 12, lanes=12)
    stays = of_growth(bounds, 7, 8)
    assert stays == Stay("8 workers instead of 7 would be no faster: one would still have 2 lanes of a step")
    assert of_growth(bounds, 7, 12) == Leave("grow from 7 to 12 workers")
    assert of_growth(dataclasses.replace(bounds, grow="always"), 7, 8) == Leave("grow from 7 to 8 workers")


def test_one_worker_more_of_two_thousand_pays_where_each_step_becomes_a_lane_shorter() -> None:
    """16 lanes a worker: at 2,047 a step takes 17, so one node is worth 6% and not a twentieth of a percent."""
    bounds = Bounds(1, 2048, expected_loss_s=3.1 * HOUR, lanes=16 * 2048)
    assert of_growth(bounds, 2047, 2048) == Leave("grow from 2047 to 2048 workers")
    assert isinstance(of_growth(dataclasses.replace(bounds, lanes=0), 2047, 2048), Stay)  # as it seemed before
    assert isinstance(of_growth(bounds, 1930, 2047), Stay)  # 17 before and after


def test_doomed_nodes_are_not_left_early_for_workers_that_would_be_no_faster() -> None:
    group, names = WorkerGroup(tuple("abcdefg")), "abcdefgh"
    nodes = [Node(name, 1, leaves_at=130.0 if name == "a" else None) for name in names + "i"]
    for lanes, expected in ((12, Stay), (16, Leave)):  # 7 of them and two that joined: 8 workers
        bounds = Bounds(1, 12, lanes=lanes)
        prospects = RestartForecast(2.0, step_s=1.0)
        _, memory = decide(bounds, [Node(one.id, 1) for one in nodes], group, prospects, PolicyState(), 0.0)
        _, memory = decide(bounds, nodes, group, prospects, memory, 10.0)
        decision, _ = decide(bounds, nodes, group, prospects, memory, 20.0)
        assert isinstance(decision, expected), (lanes, decision)


@given(lanes=some.integers(1, 500), workers=some.integers(1, 500))
def test_a_step_takes_as_long_as_the_worker_with_the_most_lanes(lanes: int, workers: int) -> None:
    dealt = [0] * workers
    for lane in range(lanes):
        dealt[lane * workers // lanes] += 1  # as the order deals them
    assert max(dealt) == most_lanes(lanes, workers)
    assert speed(lanes, workers) == pytest.approx(sum(dealt) / max(dealt))
    assert evenness(lanes, workers) == pytest.approx(sum(dealt) / max(dealt) / workers)


@given(lanes=some.integers(8, 400), least=some.integers(1, 8), most=some.integers(0, 30))
def test_the_more_even_batch_is_near_and_never_less_even(lanes: int, least: int, most: int) -> None:
    sizes = range(least, min(lanes, least + most) + 1)
    found = more_even(lanes, sizes)
    assert abs(found.lanes - lanes) <= lanes / 8
    assert found.lanes >= sizes[-1]
    assert found.mean >= lane_evenness(lanes, sizes).mean - 1e-3
