"""Every worker-second is of one kind, and they sum to what was held."""

from __future__ import annotations

import dataclasses

import pytest

from springtide.events import Decided, Event, Failed, Left, Miscomputed, Saved, Started, StepDone, Straggling
from springtide.tracking.ledger import Prices, ledger


def step(number: int, time_s: float, workers: int, step_time_s: float = 1.0, wait_s: float = 0.0) -> StepDone:
    return StepDone(
        step=number,
        time_s=time_s,
        term=1,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        tokens=number,
        step_tokens=1,
        step_time_s=step_time_s,
        data_wait_s=wait_s,
        tokens_per_s=1.0,
        mfu=0.5,
        memory_bytes=1,
        world_size=workers,
        digest="0",
    )


def started(at: int, time_s: float, workers: int, *markets: str) -> Started:
    return Started(step=at, world_size=workers, time_s=time_s, term=1, markets=list(markets))


def decided(decision: str, reason: str, time_s: float) -> Decided:
    return Decided(step=0, decision=decision, reason=reason, time_s=time_s, term=1)


HISTORY: list[Event] = [
    decided("start", "3 of 3 workers on 3 nodes", 0.0),
    started(0, 10.0, 3),
    step(1, 11.0, 3, wait_s=0.25),
    step(2, 12.0, 3),
    Saved(step=2, name="x", size_bytes=1, save_time_s=0.1, time_s=12.5, term=1),
    step(3, 13.5, 3),
    Failed(step=3, cause="lost nodes", reason="a", again=True, time_s=14.0, term=1),
    started(2, 16.0, 2),
    step(3, 17.0, 2),
    decided("leave", "grow from 2 to 3 workers", 17.5),
    step(4, 18.0, 2),
    Left(step=4, kept_in="memory", time_s=18.25, term=1),
    decided("stay", "waiting for capacity: room for 0 workers", 18.5),
    decided("start", "3 of 3 workers on 3 nodes", 28.5),
    started(4, 29.0, 3),
    step(5, 30.5, 3),
]


ENERGY = ("energy_kwh", "energy_counted", "energy_sources")


def test_a_ledger_as_plain_data_has_the_keys_of_the_report() -> None:
    book = ledger(HISTORY, Prices(other=3600.0))
    shown = book.as_dict()
    figures = ["goodput", "tokens", "dollars_per_million_tokens"]
    assert list(shown) == [*figures, "held", "spent", "restarts", "stragglers", "dollars", "market_dollars", *ENERGY]
    assert (shown["tokens"], shown["dollars_per_million_tokens"]) == (5, 1e6 * book.total_dollars / 5)
    assert shown["restarts"][0]["steps_lost"] == 1
    assert ledger([]).as_dict()["dollars_per_million_tokens"] == 0.0


def test_restarts_have_a_cause_a_gap_and_the_steps_they_lost() -> None:
    first, second = ledger(HISTORY).restarts
    assert (first.cause, first.workers_before, first.workers_after) == ("lost nodes: a", 3, 2)
    assert (first.gap_s, first.step, first.steps_lost) == (2.5, 2, 1)
    assert (second.cause, second.workers_before, second.workers_after) == ("grow from 2 to 3 workers", 2, 3)
    assert (second.gap_s, second.step, second.steps_lost) == (11.5, 4, 0)


def test_a_group_that_is_replaced_before_it_fails_has_lost_the_same() -> None:
    told = [decided("replace", "lost nodes: a", 14.0) if isinstance(event, Failed) else event for event in HISTORY]
    assert ledger(told).restarts == ledger(HISTORY).restarts
    assert ledger(told).spent == ledger(HISTORY).spent


def test_every_second_is_of_one_kind() -> None:
    found = ledger(HISTORY)
    assert found.spent == pytest.approx(
        {
            "start_up": 10 * 3,
            "productive": 3 * 3 - 0.75 + 2 + 3,
            "data_stall": 0.75,
            "checkpoint_stall": 0.5 * 3,
            "recomputed": 2,
            "resize": 0.5 * 3 + 2 * 2 + 0.25 * 2 + (0.25 + 0.5 + 0.5) * 3,
            "waiting": 10 * 3,
            "evaluation": 0,
            "other": 0,
        }
    )
    # 3 workers until the loss is known, 2 until they left, then those of the next group
    assert found.held == pytest.approx(14 * 3 + 4.25 * 2 + 12.25 * 3)
    assert found.goodput == pytest.approx((9 - 0.75 + 5) / found.held)


def test_time_between_two_starts_of_the_driver_is_nobodys() -> None:
    again = [
        Started(step=5, world_size=2, time_s=1000.0, term=2),
        StepDone(**{**step(6, 1001.0, 2).__dict__, "term": 2}),
    ]
    found = ledger([*HISTORY, *again])
    assert found.held == pytest.approx(ledger(HISTORY).held + 2)
    assert found.restarts[-1].cause == "the driver was started again"


def test_dollars_are_charged_only_for_workers_that_were_held() -> None:
    hours = 3600.0
    first = [
        started(0, 0.0, 8, *["spot"] * 8),
        *(step(number, float(number), 8) for number in range(1, 11)),
        Failed(step=10, cause="lost nodes", reason="a", again=True, time_s=11.0, term=1),
        decided("stay", "waiting for capacity: room for 0 workers", 11.0),
        decided("stay", "waiting for capacity: room for 0 workers", 10 * hours),
    ]
    again = [started(10, 11 * hours, 8, *["spot"] * 8), step(11, 11 * hours + 1, 8)]
    found = ledger([*first, *(dataclasses.replace(event, term=2) for event in again)], Prices(2.0, 2.0))
    assert found.spent["waiting"] == found.dollars["waiting"] == 0.0
    assert found.held == 8 * (11.0 + 1.0)
    assert found.total_dollars == pytest.approx(found.held / hours * 2.0)


def test_a_group_that_starts_twice_after_a_pause_is_charged_from_its_first_start() -> None:
    paused = [
        decided("stay", "paused by a@b", 0.0),
        started(0, 10.0, 2),
        started(0, 14.0, 2),
        step(1, 15.0, 2),
    ]
    assert ledger(paused).spent["start_up"] == 2 * 4.0


def test_seconds_have_the_price_of_the_market_they_were_bought_on() -> None:
    history = [
        decided("start", "2 of 2 workers on 2 nodes", 0.0),
        started(0, 10.0, 2, "spot", "on-demand"),
        step(1, 11.0, 2),
        Failed(step=1, cause="lost nodes", reason="a", again=True, time_s=12.0, term=1),
        started(1, 14.0, 1, "on-demand"),
        step(2, 15.0, 1),
    ]
    found = ledger(history, Prices(other=7200.0, spot=3600.0))
    assert {kind: dollars for kind, dollars in found.dollars.items() if dollars} == pytest.approx(
        {"start_up": 10 * 3, "productive": 3 + 2, "resize": 1 * 3 + 2 * 2}
    )
    assert found.market_dollars == pytest.approx({"spot": 12.0, "other": 30.0})
    assert sum(found.market_dollars.values()) == pytest.approx(found.total_dollars)
    assert sum(ledger(history).dollars.values()) == 0.0
    unlabelled = [started(0, 0.0, 3), step(1, 1.0, 3)]
    assert ledger(unlabelled, Prices(other=3600.0)).dollars["productive"] == 3.0


def test_a_group_that_goes_back_because_of_wrong_results_is_over() -> None:
    told = Miscomputed(step=3, ranks=[1], nodes=["b"], agreed_step=1, reason="rank 1 lies", time_s=14.0, term=1)
    history: list[Event] = [
        started(0, 10.0, 2),
        *(step(number, 10.0 + number, 2) for number in (1, 2, 3)),
        told,
        started(1, 16.0, 1),
        step(2, 17.0, 1),
    ]
    [restart] = ledger(history).restarts
    assert (restart.cause, restart.gap_s, restart.steps_lost) == ("wrong results: rank 1 lies", 3.0, 2)


def test_stragglers_are_named() -> None:
    slow = Straggling(step=5, rank=1, node="n", share=0.4, time_s=30.5, term=1)
    assert ledger([*HISTORY, slow]).stragglers == [slow]
    assert ledger([*HISTORY, slow]).held == ledger(HISTORY).held


def test_a_run_without_events_held_nothing() -> None:
    assert ledger([]).goodput == 0.0


def test_a_paused_run_is_charged_nothing_until_it_trains_on() -> None:
    history: list[Event] = [
        decided("start", "2 of 2 workers on 2 nodes", 0.0),
        started(0, 1.0, 2),
        step(1, 2.0, 2),
        decided("leave", "paused by me@here", 2.5),
        Left(step=1, kept_in="store", time_s=3.0, term=1),
        decided("stay", "paused by me@here, and holds no workers", 4.0),
        decided("start", "2 of 2 workers on 2 nodes", 1004.0),
        started(1, 1006.0, 2),
        step(2, 1007.0, 2),
    ]
    book = ledger(history)
    assert book.held == 2 * (4.0 + 3.0)
    assert [one.gap_s for one in book.restarts] == [4.0]
