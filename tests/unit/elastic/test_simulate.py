"""Records of spot capacity, and what the policy makes of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from springtide.elastic.copies import place
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs, SimulationResult, checkpoint_restart, simulate, tuned_checkpoint_restart
from springtide.elastic.traces import (
    Change,
    FailureRates,
    Trace,
    larger,
    of_nodes,
    of_numbers,
    poisson_failures,
    read,
    smaller,
)
from springtide.errors import ConfigError

HOUR = 3600.0
numbers = some.lists(some.integers(0, 12), min_size=2, max_size=30)


def steady(nodes: int, *changes: Change, hours: float = 1.0) -> Trace:
    first = Change(0.0, tuple(f"n{one}" for one in range(nodes)), ())
    return Trace((first, *changes), hours * HOUR)


def together(nodes: int, node: str) -> tuple[str, ...]:
    """A node of ``steady`` and the one that holds the copy of its snapshots."""
    return (node, *place([f"n{one}" for one in range(nodes)], {}, 1)[node])


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
    "text",
    [
        *("", "a,b\n", "{}", '{"metadata": {"gap_seconds": 1}, "data": ["x"]}', "1,add,a\n2,gone,b\nx\n"),
        '{"metadata": {"gap_seconds": 60}, "data": [2, null, 1]}',  # a tick is missing
        '{"metadata": {"gap_seconds": -1}, "data": [1, 2]}',
        '{"metadata": {"gap_seconds": -1}, "data": [1]}',
        '{"metadata": {"gap_seconds": 1e308}, "data": [1, 2]}',
        '{"metadata": {"gap_seconds": 600}, "data": [1, Infinity]}',
        *("0,3\n1,-2\n", "0,3\nnan,2\n", "1,3\n0,2\n", "0,add,a\ninf,add,b\n", "0,2\n1,inf\n"),
        *(f"0,add,a\n1000,add,b\n{end}\n" for end in ("inf", "nan", "999", "-1")),
        pytest.param("x" * 200_000 + ",1", id="long field"),
        pytest.param('{"a":' + "[" * 200_000, id="deep"),
    ],
)
def test_another_file_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="trace = 'mine"):
        read(text, "mine")


def test_a_record_of_changes_without_an_end_ends_with_the_latest() -> None:
    assert read("0,add,a\n2000,add,b\n1000,add,c\n", "file").end_s == 2.0


def test_a_record_of_samples_says_how_long_its_gaps_are() -> None:
    minutes = [*range(10), 100, *range(101, 110)]
    text = "".join(f"2021-12-11, {10 + minute // 60}:{minute % 60:02}:00, 4\n" for minute in minutes)
    assert read(text, "file").unknown_s == 90 * 60.0
    assert larger(read(text, "file"), 2).unknown_s == 90 * 60.0
    assert read("0,add,a\n60000,add,b\n9000000,remove,a\n9000000\n", "file").unknown_s == 0.0  # changes, no samples


@given(numbers, some.integers(1, 4), some.integers(0, 5))
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


@given(numbers, some.integers(1, 4))
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
    unused_s = noticed.possible - noticed.productive - noticed.restarting
    assert (
        5 <= unused_s <= 15 + 1e-3
    )  # of the doomed node: three steps and the reserve, less two or three steps to leave
    lost = simulate(steady(8, gone), Bounds(1, 8), Costs(step_s=10.0, restart_s=2.5, notice_s=0.0))
    assert (lost.restarts, lost.lost_memory) == (1, 0)
    assert 8 * 10 <= lost.recomputed <= 8 * 20


def test_more_nodes_at_once_than_copies_take_the_memory_with_them() -> None:
    gone = Change(1800.0, (), together(8, "n3"))
    for copies, lost_memory in ((1, 1), (2, 0)):
        costs = Costs(notice_s=0.0, copies=copies, store_every_s=600.0)
        found = simulate(steady(8, gone), Bounds(1, 8), costs)
        assert found.lost_memory == lost_memory
        assert (found.recomputed > 8 * 100) == bool(lost_memory)


def test_what_is_lost_twice_is_charged_once() -> None:
    """Two losses of memory between two checkpoints: the second finds only what was trained since the first."""
    first = together(8, "n0")
    left = [f"n{one}" for one in range(8) if f"n{one}" not in first]
    losses = (Change(1000.0, (), first), Change(1100.0, (), (left[0], *place(left, {}, 1)[left[0]])))
    costs = Costs(notice_s=0.0, step_s=1.0)
    found = simulate(steady(8, *losses), Bounds(1, 8), costs)
    assert found.lost_memory == 2
    assert found.recomputed == pytest.approx(8 * 380 + 6 * 97.5, abs=8)  # from the checkpoint at 600 s of training
    assert found.productive + found.recomputed + found.restarting == pytest.approx(found.possible, abs=1)


def test_what_is_lost_just_before_a_record_ends_is_charged() -> None:
    found = simulate(steady(2, Change(3599.0, (), ("n1",))), Bounds(1, 2), Costs(notice_s=0.0))
    assert found.recomputed == pytest.approx(2 * 19.0, abs=0.1)  # the step under way and the one before


def test_live_replicas_cost_the_step_under_way_while_one_of_each_part_is_left() -> None:
    both = Change(1804.0, (), together(8, "n3"))
    steps = {
        shards: simulate(steady(8, both), Bounds(1, 8), Costs(notice_s=0.0, replica_shards=shards))
        for shards in (0, 1, 3, 8)
    }
    assert {shards: found.lost_memory for shards, found in steps.items()} == {0: 1, 1: 0, 3: 0, 8: 1}
    assert steps[1].recomputed == steps[3].recomputed == pytest.approx(8 * 4.0, abs=0.1)


def test_a_zone_takes_its_copies_with_it_unless_zones_are_known() -> None:
    """Where zones are unknown, two of the four nodes hold each other's copies, whichever four they are."""
    trace = steady(6, Change(1800.0, (), ("n0", "n1", "n2", "n3")))
    known = dataclasses.replace(trace, domains={f"n{one}": ("west",) if one < 3 else ("east",) for one in range(6)})
    zone = dataclasses.replace(known, changes=(*known.changes[:1], Change(1800.0, (), ("n0", "n1", "n2"))))
    lost = [simulate(one, Bounds(1, 6), Costs(notice_s=0.0)).lost_memory for one in (trace, zone)]
    assert lost == [1, 0]


@given(some.integers(1, 24), some.integers(0, 3), some.sets(some.integers(0, 23), min_size=1), some.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_memory_is_lost_exactly_when_a_node_and_all_its_holders_are(
    size: int, copies: int, gone: set[int], zones: int
) -> None:
    nodes = {f"n{one}": (f"zone{one % zones}",) for one in range(size)}
    lost = tuple(f"n{one}" for one in gone if one < size)
    trace = dataclasses.replace(steady(size, *([Change(1800.0, (), lost)] if lost else [])), domains=nodes)
    found = simulate(trace, Bounds(1, size), Costs(notice_s=0.0, copies=copies))
    holders = place(nodes, nodes, copies)
    assert found.lost_memory == any({node, *holders[node]} <= {*lost} for node in nodes)


def test_a_hang_costs_the_time_until_it_is_found_and_the_step_under_way() -> None:
    trace = dataclasses.replace(steady(4), hangs_s=(1804.0,))
    found = simulate(trace, Bounds(1, 4), Costs(hang_s=300.0))
    assert (found.hanging, found.restarts, found.lost_memory) == (pytest.approx(4 * 300.0), 1, 0)
    assert found.recomputed == pytest.approx(4 * 4.0, abs=0.1)


def test_work_in_whole_lanes_is_uneven_and_a_step_of_fewer_workers_longer() -> None:
    trace = steady(8, Change(1800.0, (), ("n7",)))
    found = simulate(trace, Bounds(1, 8, lanes=16), Costs())
    assert found.uneven / (found.uneven + found.productive) == pytest.approx(7 / 15 * (1 - 16 / 21), rel=0.02)
    assert found.goodput > 0.98  # of steps, as in a run's ledger
    assert found.of_ideal < 0.9


def test_saves_in_the_store_cost_what_they_take_and_limit_what_is_lost() -> None:
    left, losses = [f"n{one}" for one in range(12)], list[Change]()
    for time_s in (300.0, 600.0, 900.0):
        gone = (left[0], *place(left, {}, 1)[left[0]])
        losses.append(Change(time_s, (), gone))
        left = [node for node in left if node not in gone]
    kept = {
        every_s: simulate(steady(12, *losses), Bounds(1, 12), Costs(notice_s=0.0, store_every_s=every_s, save_s=1.0))
        for every_s in (60.0, 600.0)
    }
    assert kept[60.0].lost_memory == kept[600.0].lost_memory == 3
    assert kept[60.0].recomputed < kept[600.0].recomputed / 4
    assert kept[60.0].saving / kept[60.0].possible == pytest.approx(1 / 61, rel=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_a_longer_notice_never_makes_it_worse(seed: int) -> None:
    """120 s were worse than 30 s, and on some records than none: doomed nodes were left 100 s early."""
    chance = random.Random(seed)
    numbers = [(60.0 * tick, chance.randint(6, 12)) for tick in range(0, 240, 4)]
    trace = of_numbers(numbers, 240.0)
    found = [simulate(trace, Bounds(1, 12), Costs(notice_s=notice_s, step_s=2.0)).of_ideal for notice_s in (120, 30, 0)]
    assert found == sorted(found, reverse=True)


def test_dear_restarts_for_nodes_that_keep_joining_are_made_for_several_at_once() -> None:
    joins = [Change(60.0 * one, (f"m{one}",), ()) for one in range(1, 50)]
    cheap, dear = (simulate(steady(20, *joins), Bounds(1, 99), Costs(restart_s=restart_s)) for restart_s in (0.5, 30.0))
    assert cheap.restarts >= 40
    assert 4 <= dear.restarts <= 15  # the best number is about nine
    assert dear.of_ideal > 0.85


def test_failures_of_a_reliable_cluster_come_at_their_rate_and_in_racks() -> None:
    rates = FailureRates(mttf_s=HOUR, hangs=0.25, racks=0.25, rack_nodes=4)
    trace = poisson_failures(16, 400 * HOUR, rates)
    losses = [change for change in trace.changes if change.gone]
    assert len(trace.hangs_s) == pytest.approx(100, rel=0.25)
    assert len(losses) == pytest.approx(300, rel=0.15)
    assert sum(len(change.gone) > 1 for change in losses) == pytest.approx(100, rel=0.25)
    assert all(len({trace.domains[node] for node in change.gone}) == 1 for change in losses)
    assert trace.most == 16
    assert trace == poisson_failures(16, 400 * HOUR, rates)


def test_one_node_of_two_thousand_is_worth_a_restart_because_of_whole_lanes() -> None:
    """One failure in 3.1 h at 2,048 nodes: 5.8% were lost to uneven steps at 2,047 for good."""
    trace = poisson_failures(2048, 12 * HOUR, FailureRates(3.1 * HOUR), seed=1)
    found = simulate(trace, Bounds(1, 2048, lanes=16 * 2048), Costs(restart_s=20.0, warm_up_s=90.0, notice_s=0.0))
    losses = sum(bool(change.gone) for change in trace.changes)
    assert 2 * losses - 2 <= found.restarts <= 2 * losses  # two may come at once
    assert found.uneven / found.possible < 0.003
    assert found.of_ideal > 0.985


def test_checkpoints_alone_lose_what_was_trained_since() -> None:
    found = checkpoint_restart(steady(8, Change(1800.0, (), ("n3",))), Bounds(1, 8), 600.0, 75.0)
    assert found.recomputed == 8 * ((1800.0 - 75.0) % 600.0)
    assert found.restarts == 1


def test_the_best_interval_beats_the_usual_one() -> None:
    trace, bounds = steady(8, Change(1800.0, (), ("n3",))), Bounds(1, 8)
    usual = checkpoint_restart(trace, bounds, 600.0, 75.0)
    free, dear = (tuned_checkpoint_restart(trace, bounds, 75.0, save_s) for save_s in (0.0, 10.0))
    assert free.every_s < dear.every_s
    assert free.result.productive > dear.result.productive
    assert free.result.productive > usual.productive


@settings(max_examples=60, deadline=None)
@given(numbers, some.sampled_from([0.0, 30.0, 120.0]), some.integers(1, 4))
def test_no_second_is_trained_twice_over(ticks: list[int], notice_s: float, least: int) -> None:
    trace = of_numbers([(90.0 * tick, number) for tick, number in enumerate(ticks)], 90.0)
    bounds = Bounds(least, 10)

    def check(found: SimulationResult) -> None:
        spent = found.productive + found.recomputed + found.restarting + found.uneven + found.saving + found.hanging
        assert min(found.productive, found.recomputed, found.restarting, found.uneven) >= -1e-6
        assert spent <= found.possible + 1e-3 * (1 + len(ticks)) * 10

    hung = dataclasses.replace(trace, hangs_s=(400.0, 1000.0))
    check(simulate(trace, bounds, Costs(notice_s=notice_s)))
    check(simulate(hung, bounds, Costs(notice_s=notice_s, replica_shards=2, store_every_s=100.0, save_s=2.0)))
    lanes = dataclasses.replace(bounds, lanes=25)
    check(simulate(trace, lanes, Costs(notice_s=notice_s)))
    check(checkpoint_restart(trace, lanes, 120.0, 30.0, 1.0))
