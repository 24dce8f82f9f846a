"""What a run with a deadline orders and gives back, of nodes with several places, on a cluster that is not only its own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from springtide.elastic.forecast import RestartForecast
from springtide.elastic.market import Deadline, Rental
from springtide.elastic.on_demand import MarketNode, OnDemandPlan, Order, OrderBook, StepWork, outlook
from springtide.elastic.policy import Bounds

HOUR = 3600.0
PLAN = Deadline(8 * 10 * HOUR, 20 * HOUR, workers=8, change_s=300.0)
"""Half the group is fast enough."""


def spot(*places: int) -> list[MarketNode]:
    return [MarketNode(f"s{number}", one, False, True) for number, one in enumerate(places)]


def ordered(*places: int, in_group: bool = True) -> list[MarketNode]:
    return [MarketNode(f"d{number}", one, True, in_group) for number, one in enumerate(places)]


def wanting(number: int) -> OrderBook:
    """A book that has ordered this many workers."""
    book = OrderBook()
    book.decide(PLAN, [], 0.0, 0.0, rule=lambda *_: Rental(number, ""))
    assert (book.workers, book.owed) == (number, number)
    return book


def decided(book: OrderBook, nodes: list[MarketNode], number: int, multiple: int = 1) -> Order:
    return book.decide(PLAN, nodes, 0.0, 0.0, multiple, rule=lambda *_: Rental(number, "why"))


def test_what_has_not_come_is_cancelled_before_anything_is_given_back() -> None:
    book = wanting(4)
    assert decided(book, ordered(1, 1), 3) == Order(3, (), "why")
    assert decided(book, ordered(1, 1), 1) == Order(1, ("d1",), "why")
    assert (book.workers, book.owed) == (1, 3)


def test_nodes_are_given_back_whole_first_those_without_the_group() -> None:
    book = wanting(8)
    here = [*ordered(4), MarketNode("idle", 4, True)]
    assert decided(book, here, 5) == Order(8, (), "why"), "a part of a node cannot be given back"
    assert decided(book, here, 4) == Order(4, ("idle",), "why")
    assert decided(book, ordered(4), 1) == Order(4, (), "why")
    assert decided(book, ordered(4), 0) == Order(0, ("d0",), "why")
    assert book.owed == 0


def test_nodes_that_it_did_not_order_count_as_spot_nodes_and_stay() -> None:
    book, seen = OrderBook(), []

    def rule(plan: Deadline, rented: object, done: float, now: float) -> Rental:
        seen.append(rented)
        return Rental(0, "")

    assert book.decide(PLAN, [*spot(1), *ordered(1, 1)], 0.0, 0.0, rule=rule) == Order(0, (), "")
    assert seen == [(3, 0)]


def test_a_node_that_comes_after_its_order_was_cancelled_is_given_back() -> None:
    book = wanting(1)
    assert decided(book, spot(1), 0) == Order(0, (), "why")
    assert decided(book, [*spot(1), *ordered(1, in_group=False)], 0) == Order(0, ("d0",), "why")
    assert decided(book, [*spot(1), MarketNode("another", 1, True)], 0) == Order(0, (), "why"), (
        "no order brought that one"
    )


def test_workers_come_in_multiples_and_no_more_than_the_group_has() -> None:
    assert decided(OrderBook(), spot(1), 2, multiple=4).workers == 3
    assert decided(OrderBook(), spot(1), 6, multiple=4).workers == 7
    assert decided(wanting(4), [*spot(4), *ordered(4)], 1, multiple=4).workers == 4
    assert decided(OrderBook(), spot(1, 1, 1, 1), 0, multiple=4).workers == 0


def test_before_a_step_is_measured_only_the_least_group_is_ordered_once() -> None:
    book = OrderBook()
    assert book.first(spot(1), 3).workers == 2
    assert book.first([*spot(1), *ordered(1)], 3).workers == 2
    assert book.owed == 2
    assert OrderBook().first(spot(4), 3).workers == 0


@settings(max_examples=60)
@given(some.lists(some.tuples(some.integers(0, 8), some.lists(some.integers(1, 3), max_size=4)), max_size=12))
def test_it_gives_back_only_what_an_order_brought_and_keeps_what_is_wanted(turns: list[tuple[int, list[int]]]) -> None:
    book = OrderBook()
    for wanted, places in turns:
        here, owed = ordered(*places), book.owed
        mine = {node.id: node.places for node in book.mine(here)}
        order = decided(book, here, wanted)
        assert {*order.give_back} <= mine.keys()
        assert not order.give_back or owed > 0
        assert sum(mine.values()) - sum(mine[node] for node in order.give_back) >= min(sum(mine.values()), wanted)
        assert book.owed >= 0
        assert order.workers >= 0


def test_a_node_larger_than_its_order_is_given_back_when_none_of_it_is_wanted() -> None:
    book = wanting(3)
    assert decided(book, ordered(8), 3) == Order(8, (), "why")
    assert decided(book, ordered(8), 1) == Order(8, (), "why")
    assert decided(book, ordered(8), 0) == Order(0, ("d0",), "why")
    assert book.owed == 0


def test_the_real_rule_orders_behind_the_line_and_gives_back_ahead_of_it() -> None:
    book = OrderBook()
    behind = book.decide(PLAN, spot(1), done=10 * HOUR, now=5 * HOUR)
    assert (behind.workers, behind.give_back) == (4, ())
    still = book.decide(PLAN, [*spot(1), *ordered(1, 1, 1, 1)], done=15 * HOUR, now=5 * HOUR)
    assert (still.workers, still.give_back) == (4, ())
    ahead = book.decide(PLAN, [*spot(1), *ordered(1, 1, 1, 1)], done=21 * HOUR, now=5 * HOUR)
    assert (ahead.workers, len(ahead.give_back)) == (2, 2)
    late = book.decide(PLAN, spot(1), done=10 * HOUR, now=11 * HOUR)
    assert late.workers == 7


def test_the_time_of_a_step_counts_from_the_third_on_and_with_the_lanes_that_it_had() -> None:
    work = StepWork(lanes=12)
    assert work.measure(1, 9.0, 8) is None
    assert work.measure(3, 2.0, 8) == 12.0
    assert work.measure(0, math.inf, 0) == 12.0, "while no group trains, the last one counts"
    assert work.measure(4, 2.0, 12) == 24.0


def test_a_branched_run_plans_its_own_steps_only() -> None:
    plan = OnDemandPlan(num_steps=300, first_step=100, begun_s=50.0, until_s=1050.0)
    found = plan.deadline(2.0, Bounds(1, 8, worker_multiple=3), RestartForecast(restart_s=4.0, step_s=math.inf), 60.0)
    assert found == Deadline(400.0, 1000.0, workers=6, change_s=64.0, loss_s=4.0)
    assert (plan.done(150, 2.0), plan.done(0, 2.0)) == (100.0, 0.0)


@pytest.mark.parametrize("lanes", [0, 24])
def test_a_deadline_that_cannot_be_met_says_what_can(lanes: int) -> None:
    plan = PLAN._replace(lanes=lanes)
    assert outlook(plan, 8, 0.0, 9.9 * HOUR, 2.0).can_be_met
    late = outlook(plan, 8, 0.0, 12 * HOUR, 2.0)
    assert not late.can_be_met
    assert late.finish_s == 22 * HOUR
    assert late.dollars == 160.0
    assert late.workers == (12 if lanes else 11)
    assert late.workers_dollars == late.workers * 8 * 2.0
    assert outlook(plan, 0, 0.0, 20 * HOUR - 100.0, 2.0).workers == 0, "not even a changeover is left"
    assert outlook(plan, 8, plan.work, 21 * HOUR, 2.0).finish_s == 21 * HOUR
