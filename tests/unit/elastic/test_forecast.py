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
    assert before == (10.0, math.inf, math.inf, 0.0, 0.0, 2)  # a group leaves at once while its steps are unknown
    history.add({"kind": "started"})
    for number in range(1, 11):
        history.add(step(number, 2.0 * number))
    assert history.step == 10
    assert history.prospects() == (10.0, 180.0, 2.0, 0.0, 0.0, 2)
    history.add({"kind": "started"})
    history.add(step(10, 25.0))
    assert history.prospects() == (3.0, 180.0, 2.0, 0.0, 0.0, 2)
    history.add({"kind": "started"})
    history.add(step(11, 32.0))
    assert history.prospects() == (4.0, 178.0, 2.0, 0.0, 0.0, 2)


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


def test_a_group_that_hangs_at_its_first_collective_is_found_by_what_the_starts_of_its_run_have_taken() -> None:
    history = RunHistory(100)
    history.restart()
    history.runs(workers=2, now=100.0)
    assert history.longest_s(300.0) == 3600.0  # nothing is known yet
    history.formed(now=109.0)
    assert history.longest_s(300.0) == 3600.0  # it restores, and may compile
    history.add(step(1, 150.0))
    history.restart()
    history.runs(workers=2, now=200.0)
    assert (history.longest_s(300.0), history.longest_s(5.0)) == (300.0, 36.0)
    history.restart()
    history.runs(workers=4, now=300.0)
    assert (history.longest_s(5.0), history.longest_s(8.0)) == (60.0, 72.0)  # never more than before the first
    history.formed(now=301.0)
    history.restart()
    history.runs(workers=2, now=400.0)
    assert history.longest_s(5.0) == 36.0  # the longest counts


def test_a_group_that_is_complete_before_its_driver_has_looked_is_a_short_start() -> None:
    history = RunHistory(100)
    history.restart()
    history.formed(now=100.0)
    history.runs(workers=2, now=100.5)
    assert history.longest_s(5.0) == 60.0
    history.restart()
    history.runs(workers=2, now=200.0)
    assert history.longest_s(1.0) == 8.0  # how many workers met then is not known: one is assumed


def test_it_learns_how_long_a_save_and_a_copy_in_memory_take() -> None:
    history = RunHistory(100)
    history.add({"kind": "started"})
    history.add(step(1, 2.0))
    history.add({"kind": "saved", "save_time_s": 30.0})
    history.add({"kind": "saved", "save_time_s": 20.0})
    history.add({"kind": "left", "kept_in": "store", "time_s": 50.0})
    assert history.prospects()[3:5] == (30.0, 0.0)
    history.add(step(2, 60.0))
    history.add({"kind": "left", "kept_in": "memory", "time_s": 66.0})
    history.add({"kind": "started"})
    assert history.prospects()[2:5] == (2.0, 30.0, 6.0)  # as before, until its first step


def test_how_many_steps_leaving_takes_is_counted_and_a_leave_that_failed_is_asked_for_earlier() -> None:
    history, asked = RunHistory(1000), {"kind": "decided", "decision": "leave", "reason": "notice: a"}
    number = 0

    def leaves(after: int, left: bool = True) -> int:
        nonlocal number
        history.add({"kind": "started"})
        for asking in (False, True):
            _ = history.add(asked) if asking else None
            for _ in range(after if asking else 2):
                number += 1
                history.add(step(number, 2.0 * number))
        if left:
            history.add({"kind": "left", "kept_in": "memory", "time_s": 2.0 * number + 0.1})
        return history.prospects().leave_steps

    assert [leaves(1), leaves(1), leaves(1)] == [2, 2, 1]  # three are enough to believe them
    assert leaves(5) == 5  # short steps: many end until the driver's request is here
    assert leaves(1, left=False) == 5
    assert leaves(2) == 10  # the node was gone before the group had left
    assert [leaves(2) for _ in range(9)][-1] == 2  # forgotten
