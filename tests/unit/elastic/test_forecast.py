"""What a run learns of its own restarts."""

from __future__ import annotations

import math
from typing import Any

from springtide.elastic.forecast import RunHistory


def step(number: int, time_s: float, step_time_s: float = 2.0) -> dict[str, Any]:
    return {"kind": "step", "step": number, "time_s": time_s, "step_time_s": step_time_s}


def test_it_learns_gaps_and_what_is_left() -> None:
    history = RunHistory(100)
    before = history.prospects()
    assert before == (10.0, math.inf, math.inf, 0.0, 0.0)  # a group leaves at once while its steps are unknown
    history.add({"kind": "started"})
    for number in range(1, 11):
        history.add(step(number, 2.0 * number))
    assert history.step == 10
    assert history.prospects() == (10.0, 180.0, 2.0, 0.0, 0.0)
    history.add({"kind": "started"})
    history.add(step(10, 25.0))
    assert history.prospects() == (3.0, 180.0, 2.0, 0.0, 0.0)
    history.add({"kind": "started"})
    history.add(step(11, 32.0))
    assert history.prospects() == (4.0, 178.0, 2.0, 0.0, 0.0)


def test_a_group_is_hung_after_many_usual_steps_and_much_later_before_its_first() -> None:
    history = RunHistory(100)
    history.add({"kind": "started"})
    assert history.longest_s(5.0) == 60.0
    for number in range(1, 4):
        history.add(step(number, 2.0 * number))
    assert history.longest_s(5.0) == 40.0
    assert history.longest_s(300.0) == 300.0
    history.restart()  # the next group may restore for longer than it may be silent later
    assert history.longest_s(300.0) == 3600.0
    history.add({"kind": "started"})  # its first step may compile
    assert history.longest_s(300.0) == 3600.0
    history.add(step(4, 8.0))
    assert history.longest_s(300.0) == 300.0


def test_it_learns_how_long_a_save_and_a_copy_in_memory_take() -> None:
    history = RunHistory(100)
    history.add({"kind": "started"})
    history.add(step(1, 2.0))
    history.add({"kind": "saved", "save_time_s": 30.0})
    history.add({"kind": "saved", "save_time_s": 20.0})
    history.add({"kind": "left", "kept_in": "store", "time_s": 50.0})
    assert history.prospects()[3:] == (30.0, 0.0)
    history.add(step(2, 60.0))
    history.add({"kind": "left", "kept_in": "memory", "time_s": 66.0})
    history.add({"kind": "started"})
    assert history.prospects()[2:] == (2.0, 30.0, 6.0)  # as before, until its first step
