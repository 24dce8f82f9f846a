"""How recovery.py takes a gap from a journal, and what torchft's logs tell it."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
from quick import BENCHMARKS

from springtide.config.steps import StepsDone
from springtide.events import Event, Failed, Left, Started, StepDone

sys.path.append(str(BENCHMARKS))  # last: tests/programs has a layouts.py, too
recovery_phases, recovery_torchft = map(importlib.import_module, ("recovery_phases", "recovery_torchft"))


def step(number: int, time_s: float, workers: int, took_s: float = 0.2) -> StepDone:
    return StepDone(
        step=StepsDone(number),
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        tokens=1,
        step_tokens=1,
        step_time_s=took_s,
        data_wait_s=0.0,
        tokens_per_s=1.0,
        mfu=0.0,
        memory_bytes=0,
        world_size=workers,
        digest="",
        time_s=time_s,
    )


def started(time_s: float, after: int, **phases_s: float) -> Started:
    return Started(step=StepsDone(after), world_size=2, time_s=time_s, phases_s=phases_s)


AFTER = [step(6, 103.5, 2, 1.0), step(7, 103.7, 2), step(8, 103.9, 2)]
KILL: list[Event] = [
    step(6, 100.0, 3),
    Failed(step=6, cause="lost nodes", reason="a", again=True, time_s=100.7),
    started(102.0, 5, rendezvous=0.4, data=0.1, state=0.5),
    *AFTER,
]


def test_the_phases_of_a_kill_sum_to_its_gap() -> None:
    [found] = recovery_phases.restarts(KILL)
    assert found.gap_s == pytest.approx(3.3)  # a usual step takes 0.2
    assert found.steps_lost == 1
    phases = recovery_phases.phases(found, began_s=100.1)
    assert [round(phases[name], 3) for name in recovery_phases.PHASES] == [0.1, 0.6, 0.3, 0.4, 0.6, 1.3]
    assert sum(phases.values()) == pytest.approx(found.gap_s)


def test_a_group_that_leaves_is_known_to_by_its_own_event() -> None:
    left = Left(step=StepsDone(5), kept_in="memory", time_s=100.3)
    [found] = recovery_phases.restarts([step(5, 100.0, 3), left, started(101.0, 5, data=0.2), *AFTER])
    phases = recovery_phases.phases(found, began_s=99.0)
    assert (phases["under_way"], round(phases["detection"], 3), phases["let_go"]) == (0.0, 0.3, 0.0)
    assert (round(phases["rendezvous"], 3), found.steps_lost) == (0.5, 0)


def tried(batch: int, step: int, **others: Any) -> dict[str, Any]:
    found = {
        "time_s": 10.0 + batch,
        "step_time_s": 0.5,
        "batch": batch,
        "step": step,
        "committed": True,
        "counts": True,
    }
    return {**found, "workers": 3, "quorum": 1, "loss": 2.0, **others}


def test_torchft_tells_what_it_lost_and_what_it_read_again() -> None:
    first = [tried(0, 1), tried(1, 1, committed=False), tried(2, 2, workers=2, quorum=2, heldout=1.5)]
    last = [tried(0, 1), tried(0, 2, quorum=2)]  # started anew: from the beginning of its part
    found = recovery_torchft.changed({0: first, 1: last}, {2: 1.25}, rows=4, replicas=2)
    # of two steps of two batches: replica 0 lacks its second, replica 1 too, and has its first twice
    assert found == {"samples_lost": 4.0, "samples_repeated": 2.0, "loss_off": 0.25}
    assert [one.kind for one in recovery_torchft._events(first)] == ["started", "step", "started", "step"]
