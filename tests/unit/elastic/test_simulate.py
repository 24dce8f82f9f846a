"""Records of spot capacity, and what the policy makes of them."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs, SimulationResult, checkpoint_restart, simulate
from springtide.elastic.traces import Change, Trace, larger, of_nodes, of_numbers, read, smaller
from springtide.errors import ConfigError

HOUR = 3600.0
numbers = st.lists(st.integers(0, 12), min_size=2, max_size=30)


def steady(nodes: int, *changes: Change, hours: float = 1.0) -> Trace:
    first = Change(0.0, tuple(f"n{one}" for one in range(nodes)), ())
    return Trace((first, *changes), hours * HOUR)


@pytest.mark.parametrize(
    ("text", "expected", "end_s"),
    [
        ("0,add,a\n0,add,b\n60000,remove,a\n120000\n", [(0.0, 2), (60.0, 1)], 120.0),
        (json.dumps({"metadata": {"gap_seconds": 300}, "data": [2, 2, 0, 1]}), [(0, 2), (600, 0), (900, 1)], 1200.0),
        ("2021-12-11, 11:12:00, 4\n2021-12-11, 11:10:00, 5\n", [(0.0, 5), (120.0, 4)], 120.0),
        ("0,8\n0.5,6\n1,6\n", [(0.0, 8), (1800.0, 6)], 3600.0),
    ],
)
def test_every_format_is_read(text: str, expected: list[tuple[float, int]], end_s: float) -> None:
    trace = read(text, "file")
    assert trace.numbers == expected
    assert trace.end_s == end_s
    assert trace.most == max(number for _, number in expected)


@pytest.mark.parametrize(
    "text", ["", "a,b\n", "{}", '{"metadata": {"gap_seconds": 1}, "data": ["x"]}', "1,add,a\n2,gone,b\nx\n"]
)
def test_another_file_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="trace = 'mine"):
        read(text, "mine")


@given(numbers, st.integers(1, 4), st.integers(0, 5))
def test_a_larger_trace_is_as_many_at_once_and_no_node_is_twice(ticks: list[int], times: int, seed: int) -> None:
    trace = of_numbers([(60.0 * tick, number) for tick, number in enumerate(ticks)], 60.0)
    found = larger(trace, times, seed)
    assert found.most <= times * trace.most
    here: set[str] = set()
    for change in found.changes:
        assert not here & set(change.joined)
        assert set(change.gone) <= here | set(change.joined)
        here = (here | set(change.joined)) - set(change.gone)
        assert 0 <= change.time_s <= found.end_s
    assert larger(trace, 1).numbers == of_nodes(rows_of(trace)).numbers


@given(numbers, st.integers(1, 4))
def test_a_smaller_trace_has_its_shape_and_never_nobody(ticks: list[int], most: int) -> None:
    trace = of_numbers([(60.0 * tick, number) for tick, number in enumerate(ticks)], 60.0)
    found = smaller(trace, most)
    assert all(1 <= number <= most for _, number in found)
    assert all(before[1] != after[1] for before, after in itertools.pairwise(found))
    if trace.most >= most and trace.changes:
        assert max(number for _, number in found) == most


def rows_of(trace: Trace) -> list[tuple[float, bool, str]]:
    return [
        (change.time_s, joins, node)
        for change in trace.changes
        for joins, nodes in ((True, change.joined), (False, change.gone))
        for node in nodes
    ]


def test_in_peace_only_the_start_costs() -> None:
    found = simulate(steady(8), Bounds(1, 8), Costs(first_start_s=20.0))
    assert found.restarts == 0
    assert found.of_ideal == pytest.approx(1 - 20 / HOUR, abs=1e-6)


def test_a_notice_costs_a_restart_and_no_step_a_loss_at_most_two() -> None:
    gone = Change(1800.0, (), ("n3",))
    noticed = simulate(steady(8, gone), Bounds(1, 8), Costs(step_s=10.0, restart_s=2.5, notice_s=120.0))
    assert (noticed.restarts, noticed.recomputed) == (1, 0.0)
    assert noticed.restarting == pytest.approx(8 * 20 + 7 * 2.5)
    lost = simulate(steady(8, gone), Bounds(1, 8), Costs(step_s=10.0, restart_s=2.5, notice_s=0.0))
    assert (lost.restarts, lost.lost_memory) == (1, 0)
    assert 8 * 10 <= lost.recomputed <= 8 * 20


def test_more_nodes_at_once_than_copies_take_the_memory_with_them() -> None:
    gone = Change(1800.0, (), ("n3", "n4"))
    for copies, lost_memory in ((1, 1), (2, 0)):
        found = simulate(steady(8, gone), Bounds(1, 8), Costs(notice_s=0.0, copies=copies, store_every_s=600.0))
        assert found.lost_memory == lost_memory
        assert (found.recomputed > 8 * 100) == bool(lost_memory)


def test_checkpoints_alone_lose_what_was_trained_since() -> None:
    found = checkpoint_restart(steady(8, Change(1800.0, (), ("n3",))), Bounds(1, 8), 600.0, 75.0)
    assert found.recomputed == 8 * ((1800.0 - 75.0) % 600.0)
    assert found.restarts == 1


@settings(max_examples=150, deadline=None)
@given(numbers, st.sampled_from([0.0, 30.0, 120.0]), st.integers(1, 4))
def test_no_second_is_trained_twice_over(ticks: list[int], notice_s: float, least: int) -> None:
    trace = of_numbers([(90.0 * tick, number) for tick, number in enumerate(ticks)], 90.0)
    bounds = Bounds(least, 10)

    def check(found: SimulationResult) -> None:
        spent = found.productive + found.recomputed + found.restarting
        assert min(found.productive, found.recomputed, found.restarting) >= -1e-6
        assert spent <= found.possible + 1e-3 * (1 + len(ticks)) * 10

    check(simulate(trace, bounds, Costs(notice_s=notice_s)))
    check(checkpoint_restart(trace, bounds, 120.0, 30.0))
