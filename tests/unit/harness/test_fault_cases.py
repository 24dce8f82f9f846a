"""Which faults are crossed with which points, and what the table says of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from fault_points.cases import Case, CaseResult, CrossingResult, cases_of, longest_gap_s, steps_lost
from fault_points.crossing import _Store

from springtide.errors import ConfigError
from springtide.events import Event, Started, StepDone
from springtide.storage import Folder

HELD = CaseResult(Case("restore", "before", "kill"), True, 3.21, 1, "at node a")
GOOD = CrossingResult((HELD, HELD), ("restore-before",), True, {})


def step(number: int, time_s: float = 0.0) -> StepDone:
    plain: dict[str, Any] = {one.name: 0 for one in dataclasses.fields(StepDone) if one.default is dataclasses.MISSING}
    return StepDone(**{**plain, "step": number, "time_s": time_s})


def begun(number: int) -> Started:
    plain: dict[str, Any] = {one.name: 0 for one in dataclasses.fields(Started) if one.default is dataclasses.MISSING}
    return Started(**{**plain, "step": number})


def test_every_point_is_crossed_with_every_fault() -> None:
    names = [case.name for case in cases_of()]
    assert len(names) == len(set(names)) == 8 * 2 * 5
    assert "first-collective-after-store" in names


def test_parts_of_names_select_cases() -> None:
    assert [case.name for case in cases_of("claim-after-k, commit-before-stop")] == [
        "claim-after-kill",
        "commit-before-stop",
    ]
    assert len(cases_of("restore")) == 10
    with pytest.raises(ConfigError, match=r"--only = 'restored'.*restore-before-kill"):
        cases_of("restored")


def test_steps_that_are_trained_again_are_lost() -> None:
    events: list[Event] = [begun(0), step(1), step(2), begun(1), step(2), step(3), begun(3), step(4), begun(2)]
    assert steps_lost(events, first=4) == 2  # 3 and 4; what was lost before is another case's
    assert steps_lost(events, first=0) == 3


def test_the_gap_is_the_longest_time_without_a_step_to_the_end() -> None:
    assert longest_gap_s([step(1, 11.0), step(2, 12.0), step(3, 14.5)], 10.0, 15.0) == 2.5
    assert longest_gap_s([step(1, 11.0)], 10.0, 15.0) == 4.0
    assert longest_gap_s([], 10.0, 15.0) == 5.0


@pytest.mark.parametrize(
    "change",
    [{"cases": (HELD, dataclasses.replace(HELD, held=False))}, {"verified": False}, {"leftovers": {"Worker": 1}}],
    ids=lambda change: next(iter(change)),
)
def test_a_crossing_is_ok_if_every_case_held_and_nothing_was_left(change: dict[str, Any]) -> None:
    assert GOOD.ok
    assert not dataclasses.replace(GOOD, **change).ok


def test_plain_data_begins_with_the_five_figures() -> None:
    shown = GOOD.as_dict()
    assert list(shown)[:5] == ["ok", "cases", "held", "steps_lost_max", "gap_s_max"]
    assert [shown[key] for key in list(shown)[:5]] == [True, 2, 2, 1, 3.21]
    row = {"name": "restore-before-kill", "held": True, "gap_s": 3.21, "steps_lost": 1, "remark": "at node a"}
    assert shown["table"] == [row, row]
    assert GOOD.describe().splitlines()[-1] == (
        "2 of 2 cases held; at most 1 steps lost and 3.2 s without a step; verified, nothing left behind"
    )


def test_a_store_that_is_away_fails_with_an_error_that_passes_and_comes_back_as_it_was(tmp_path: Path) -> None:
    with _Store(tmp_path) as store:
        folder = Folder(store.path / "runs")
        folder.write("a", b"1")
        store.set(away=True)
        for failing in (lambda: folder.read("a"), lambda: folder.write("b", b"2"), folder.names):
            with pytest.raises(OSError, match="symbolic links") as raised:
                failing()
            assert type(raised.value) is OSError  # not one of those that do not pass
        store.set(away=False)
        assert folder.read("a") == b"1"
        assert folder.names() == ["a"]
