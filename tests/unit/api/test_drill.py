"""What a drill says of itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from springtide.api.drill import CopiesLost, DrillResult, commits_lost, drill
from springtide.errors import ConfigError
from springtide.events import Event, Saved, Started
from springtide.planning.scenarios import SCENARIOS, ActDone
from springtide.tracking.ledger import KINDS, Ledger, Restart

RESTART = Restart(
    time_s=10.0, cause="lost nodes: a", workers_before=3, workers_after=2, gap_s=1.234, step=40, steps_lost=1
)
LEDGER = Ledger(held=3.0, spent=dict.fromkeys(KINDS, 0.0) | {"productive": 2.0}, restarts=[RESTART])
GOOD = DrillResult(
    digests_match=True,
    is_verified=True,
    loss_max_abs_diff=0.0,
    ledger=LEDGER,
    events=(ActDone(40, "kill", "01234567", 9.0),),
    leftovers={},
    steps=100,
)


@pytest.mark.parametrize(
    "change",
    [
        {"digests_match": False},
        {"is_verified": False},
        {"loss_max_abs_diff": 2e-4},
        {"leftovers": {"Worker": 1}},
        {"commits_lost": 1},
        {"left_undone": ("a node is killed at step 40",)},
        {"kept": (CopiesLost("step-0000000020", steps_lost=0),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_drill_is_ok_if_nothing_is_wrong(change: dict[str, object]) -> None:
    assert GOOD.ok
    assert not dataclasses.replace(GOOD, **change).ok


@pytest.mark.parametrize(
    ("scenario", "notice_s", "problem"),
    [
        ("drain", 2.0, "is not from 8 to 600 s"),
        ("drain", math.nan, "is not from 8 to 600 s"),
        ("drain", 3e7, "is not from 8 to 600 s"),
        ("kill", 30.0, "it is for drain only"),
    ],
)
def test_a_notice_that_no_drill_can_give_is_refused_before_anything_starts(
    scenario: str, notice_s: float, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        drill(scenario, print, notice_s=notice_s)


def test_plain_data_has_the_keys_of_the_command_and_a_prediction_only_of_a_trace() -> None:
    shown = GOOD.as_dict()
    first = ["ok", "digests_match", "loss_max_abs_diff", "gaps_s", "steps_lost", "goodput", "restarts", "spent"]
    assert list(shown) == [*first, "events", "commits_lost", "leftovers", "steps", "left_undone", "kept", "broken"]
    assert (shown["gaps_s"], shown["steps_lost"], shown["goodput"]) == ([1.23], [1], 0.6667)
    assert shown["events"] == [{"step": 40, "what": "kill", "node": "01234567", "time_s": 9.0, "notice_s": 0.0}]
    traced = dataclasses.replace(GOOD, predicted_goodput=0.98764)
    assert traced.as_dict() == {**shown, "predicted_goodput": 0.9876}


def test_the_text_names_gaps_lost_steps_and_goodput() -> None:
    assert GOOD.describe().splitlines() == [
        "the same samples at every step; losses differ by 0.0e+00 at most",
        "without a step   1.2 s",
        "steps lost       1",
        "goodput          66.7%",
    ]
    worse = dataclasses.replace(GOOD, digests_match=False, predicted_goodput=0.9).describe()
    assert worse.startswith("OTHER SAMPLES THAN THE UNDISTURBED TWIN")
    assert worse.endswith("66.7%, 90.0% predicted")


def test_a_commit_is_lost_when_a_group_begins_before_it() -> None:
    def begun(step: int) -> Started:
        plain: dict[str, Any] = {
            one.name: 0 for one in dataclasses.fields(Started) if one.default is dataclasses.MISSING
        }
        return Started(**{**plain, "step": step})

    saved = Saved(step=10, name="step-10", size_bytes=1, written_bytes=1, save_time_s=0.1, stall_s=0.0)
    events: list[Event] = [begun(0), saved, begun(10), begun(12), begun(9), begun(9)]
    assert commits_lost(events) == 2


@pytest.mark.parametrize("name", ["all", "regrow", "resize"])
def test_each_act_of_a_drill_waits_for_what_the_one_before_did(name: str) -> None:
    """A machine that trains fast reaches the step of a kill before the group of a notice has ended: one restart for both."""
    scenario = SCENARIOS[name]()
    now = scenario.workers
    for act in scenario.acts:
        assert act.workers == now, act
        now += {"drain": -act.nodes, "kill": -act.nodes, "add": act.nodes, "wait": 0}[act.what]
    assert scenario.acts[-1].what == "wait"
    assert scenario.steps_after > 0
