"""The joules of all ranks travel in the one all-reduce that each step has, and change nothing in the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loops import train_and_count

from springtide.config import Config
from springtide.events import Event, Started, StepDone
from springtide.tracking.ledger import ledger

pytestmark = pytest.mark.distributed


def steps(events: list[Event]) -> list[StepDone]:
    return [event for event in events if isinstance(event, StepDone)]


def source(events: list[Event]) -> str:
    [started] = [event for event in events if isinstance(event, Started)]
    return started.energy_source


@pytest.mark.full
def test_steps_carry_the_joules_of_all_ranks_and_are_bit_equal_to_steps_without(
    tiny: Config, ranks: Callable[..., list[Any]]
) -> None:
    def run(name: str, *counters: str) -> list[tuple[list[Event], list[int]]]:
        return ranks(2, train_and_count, tiny.override({"run.id": name, "train.eval_every": 20}), counters)

    counted, silent = run("counted", "", "another"), run("silent", "still", "still")
    (events, messages), (same, _) = counted
    here = steps(events)
    assert all(step.energy_j > step.energy_between_j > 0.0 for step in here)
    assert [(a.energy_j, a.energy_between_j) for a in here] == [(a.energy_j, a.energy_between_j) for a in steps(same)]
    assert source(events).startswith(("mixed: another; estimate: ", "mixed: another; rapl"))
    book = ledger(events)
    assert book.total_kwh * 3.6e6 == pytest.approx(sum(step.energy_j for step in here), rel=1e-3)
    assert book.energy_kwh["productive"] > 0.0
    assert book.energy_kwh["start_up"] > 0.0

    nothing, _ = silent[0]
    assert source(nothing) == "still"
    assert {step.energy_j for step in steps(nothing)} == {0.0}
    trained = [[(step.loss, step.grad_norm, step.digest) for step in steps(one)] for one in (events, nothing)]
    assert trained[0] == trained[1]
    assert messages == [len(here)] == [tiny.num_steps]
