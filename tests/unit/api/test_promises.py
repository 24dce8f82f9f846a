"""What a drill says of notices, hangs and lost copies, from the events of its run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from springtide.api.drill import CopiesLost, HangFound, NoticeKept, NotSeen, kept_of
from springtide.events import Decided, Event, Failed, Left, Saved, Started, StepDone
from springtide.planning.scenarios import ActDone

DRAINED = ActDone(5, "drain", "0badbeef", 105.0, notice_s=30.0)
HUNG = ActDone(5, "hang", "0badbeef", 105.0)
LOST = ActDone(5, "kill-copies", "0badbeef", 105.0)


def plain(cls: Any, **values: Any) -> Any:
    """An event in which all that is not given is 0."""
    needed = {one.name: 0 for one in dataclasses.fields(cls) if one.default is dataclasses.MISSING}
    needed.pop("time_s", None)
    return cls(**{**needed, **values})


def steps(first: int, last: int) -> list[Event]:
    """Steps that end a second apart; step n at 100 + n."""
    return [plain(StepDone, step=step, step_time_s=1.0, time_s=100.0 + step) for step in range(first, last + 1)]


def begins(step: int, time_s: float, resumed_from: str = "") -> Event:
    event: Event = plain(Started, step=step, time_s=time_s, resumed_from=resumed_from)
    return event


def noticed(asked_at_s: float, resumed_at: int) -> list[Event]:
    """A group that is asked to leave a node that goes at 135 s, and leaves after two steps more."""
    asked = Decided(step=0, decision="leave", reason="notice: 0badbeef will be taken away in 9 s", time_s=asked_at_s)
    last = int(asked_at_s - 100) + 2
    left = Left(step=last, kept_in="memory", time_s=101.0 + last)
    saved = plain(Saved, step=2, name="", save_time_s=1.0, time_s=102.5)
    return [begins(0, 100.0), *steps(1, last), saved, asked, left, begins(resumed_at, 140.0)]


def test_a_notice_is_used_to_its_end_if_the_group_is_asked_to_leave_at_the_last_moment() -> None:
    # two steps of 1 s, and a fifth more, until it leaves, 5 s of reserve, 1.5 times the save of 1 s: no copy has been measured
    [kept] = kept_of(noticed(126.6, resumed_at=28), [DRAINED], reserve_s=5.0)
    assert isinstance(kept, NoticeKept)
    assert (kept.margin_s, kept.asked_s, kept.left_s, kept.steps) == (8.9, 8.4, 7.0, 2)
    assert not kept.broken
    assert "notice of 30 s: asked to leave 8.40 s before the loss, measured margin 8.90 s" in kept.describe()


@pytest.mark.parametrize(
    ("asked_at_s", "resumed_at", "problem"), [(115.6, 17, "8.9 s would do"), (126.6, 27, "cost 1 steps")]
)
def test_a_promise_is_broken_by_leaving_early_and_by_a_lost_step(
    asked_at_s: float, resumed_at: int, problem: str
) -> None:
    [kept] = kept_of(noticed(asked_at_s, resumed_at), [DRAINED], reserve_s=5.0)
    assert problem in kept.broken


@pytest.mark.parametrize(
    ("found_s", "reason", "problem"),
    [
        (9.0, "no event for 6 s, all other ranks wait for 1; rank 1 does not answer", ""),
        (9.0, "no event for 9 s, rank 1 does not answer", "nobody said"),
        (19.0, "no event for 16 s, all other ranks wait for 1", "after 19.0 s, not 13.0 s"),
    ],
)
def test_a_hang_is_named_within_three_steps_and_ten_seconds(found_s: float, reason: str, problem: str) -> None:
    failed = Failed(step=5, cause="hung", reason=reason, again=True, time_s=105.0 + found_s)
    [kept] = kept_of([begins(0, 100.0), *steps(1, 5), failed, begins(5, 130.0)], [HUNG], reserve_s=5.0)
    assert isinstance(kept, HangFound)
    assert (kept.found_s, kept.steps_lost) == (found_s, 0)
    assert problem in kept.broken
    assert bool(kept.broken) == bool(problem)


@pytest.mark.parametrize(
    ("resumed_from", "step", "holds"),
    [("live copy of step 5", 5, True), ("live copy of step 4", 4, False), ("step-0000000000", 0, False)],
)
def test_a_loss_of_all_copies_costs_nothing_where_devices_have_the_state(
    resumed_from: str, step: int, holds: bool
) -> None:
    events = [begins(0, 100.0), *steps(1, 5), begins(step, 110.0, resumed_from)]
    [kept] = kept_of(events, [LOST], reserve_s=5.0, live=True)
    assert isinstance(kept, CopiesLost)
    assert (not kept.broken) == holds
    assert kept_of(events, [LOST], reserve_s=5.0) == ()  # it is not promised where each device has a part


@pytest.mark.parametrize("act", [DRAINED, HUNG, LOST], ids=lambda act: str(act.what))
def test_an_act_to_which_the_run_shows_no_answer_is_a_broken_promise(act: ActDone) -> None:
    [kept] = kept_of([begins(0, 100.0), *steps(1, 40)], [act], reserve_s=5.0, live=True)
    assert kept == NotSeen(act.what, act.node)
    assert kept.broken
