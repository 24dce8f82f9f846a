"""Commands are carried out once and acknowledged when their effect is seen, whatever comes in between."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from journal_events import step

from springtide import config as configs
from springtide.api import control
from springtide.api.control import Controls
from springtide.checkpoint import leases
from springtide.elastic import GroupRequest
from springtide.events import Commanded, Decided, Event, Saved, SaveFailed, Started, Stopped
from springtide.ray.train.mailbox import WorkerLimit
from springtide.run.control import CommandResult, Verb, give, read_result, standing, write_result
from springtide.run.folder import Run
from springtide.storage import Folder

PAUSED = Decided(step=1, decision="stay", reason="paused by me, and holds no workers")
WAIT_S = 30.0


class Workers:
    """What a worker group would be asked."""

    def __init__(self) -> None:
        self.asked: list[GroupRequest] = []
        self.limits: list[WorkerLimit] = []
        self.posted: list[Event] = []

    def ask(self, interrupt: GroupRequest) -> None:
        self.asked.append(interrupt)

    def limit(self, limit: WorkerLimit) -> None:
        self.limits.append(limit)

    def post(self, event: Event) -> None:
        self.posted.append(event)


class Driver:
    """A run, its controls, and the workers that they act on."""

    def __init__(self, root: Path) -> None:
        self.run, self.workers = Run(Folder(root / "run")), Workers()
        self.run.write_config(configs.recipes.tiny().override({"elastic.max_workers": 4, "run.root": str(root)}))
        leases.claim(self.run.folder, "driver", trains=False)
        self.controls = Controls(self.run.config, self.run, self.workers)

    def tell(self, *events: Event) -> None:
        for event in events:
            self.controls(event)

    def give(self, verb: Verb, workers: int = 0) -> int:
        """Give a command, and wait until the driver has taken it."""
        before = len(self.workers.posted)
        number = give(self.run.folder, verb, workers).number
        until(lambda: len(self.workers.posted) > before)
        return number

    def result(self, number: int) -> CommandResult:
        until(lambda: read_result(self.run.folder, number) is not None)
        found = read_result(self.run.folder, number)
        assert found is not None
        return found

    def unanswered(self, number: int) -> bool:
        return read_result(self.run.folder, number) is None


def until(happened: object) -> None:
    end_s = time.monotonic() + WAIT_S
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setattr(control, "_LOOK_S", 0.02)
    found = Driver(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(found.controls.carried_out())
        found.tell(Started(step=0, world_size=4), step(5))
        yield found


def test_a_save_is_acknowledged_by_a_state_after_the_command(driver: Driver) -> None:
    """A save is acknowledged by a state that is no older than the command."""
    number = driver.give("save")
    driver.tell(Saved(step=4, name="step-4", size_bytes=1, save_time_s=1.0))  # it was on its way
    driver.tell(SaveFailed(step=4, reason="full", in_a_row=1))
    until(lambda: driver.workers.asked.count(GroupRequest.SAVE) == 2)  # asked again, once
    assert driver.unanswered(number)
    driver.tell(Saved(step=6, name="step-6", size_bytes=1, save_time_s=1.0))
    assert (driver.result(number).done, driver.result(number).text) == (True, "step-6 is committed")


def test_a_number_far_ahead_does_not_carry_the_driver_away(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is listed at every look here, in case that numbers are missing."""
    monkeypatch.setattr(control, "_LIST_EVERY", 1)
    (driver.run.folder / "control").write("999999999.json", "{}")
    number = driver.give("save")
    driver.tell(Saved(step=6, name="step-6", size_bytes=1, save_time_s=1.0))
    assert driver.result(number).done
    assert driver.unanswered(999_999_999)


def test_a_save_across_a_loss_is_acknowledged_by_the_next_group(driver: Driver) -> None:
    """A save across a loss is acknowledged by the first of the next group."""
    number = driver.give("save")
    driver.tell(Started(step=2, world_size=3))
    driver.tell(Saved(step=3, name="step-3", size_bytes=1, save_time_s=1.0))
    assert driver.result(number).step == 3


def test_each_pause_is_acknowledged_when_the_run_holds_nothing(driver: Driver) -> None:
    """A pause is acknowledged when the run holds nothing and each one anew."""
    first = driver.give("pause")
    until(lambda: driver.workers.limits and driver.workers.limits[-1].paused_by)
    assert driver.unanswered(first)
    driver.tell(PAUSED)
    assert driver.result(first).done
    again = driver.give("pause")
    assert driver.result(again).text == "it was paused already"
    assert driver.result(driver.give("continue")).done
    assert not driver.workers.limits[-1].paused_by
    driver.tell(PAUSED)  # it was said before `continue` was heard
    driver.tell(Started(step=5, world_size=4), step(6))
    before = len(driver.workers.limits)
    later = driver.give("pause")
    until(lambda: len(driver.workers.limits) > before)
    assert driver.workers.limits[-1].serial > driver.workers.limits[-2].serial
    assert driver.unanswered(later)
    driver.tell(PAUSED)
    assert driver.result(later).step == 6


def test_a_save_of_a_paused_run_is_answered_at_once(driver: Driver) -> None:
    """Its workers are given back, so nobody would answer; what it has trained is saved."""
    driver.give("pause")
    driver.tell(PAUSED)
    found = driver.result(driver.give("save"))
    assert not found.done
    assert found.text.startswith("the run is paused, and what it has trained is saved; `springtide run continue run`")
    assert GroupRequest.SAVE not in driver.workers.asked


def test_a_resize_says_how_many_workers_train(driver: Driver) -> None:
    assert driver.result(driver.give("resize", 0)).text == "no limit but elastic.max_workers = 4; 4 workers train"
    one = driver.give("resize", 1)
    driver.tell(Started(step=6, world_size=1))
    assert driver.result(one).text == "1 worker trains"
    driver.give("pause")
    driver.tell(PAUSED)
    assert driver.result(driver.give("resize", 2)).text == "no workers train at the moment"


def test_what_is_withdrawn_before_it_took_effect_is_undone(driver: Driver) -> None:
    assert driver.result(driver.give("resize", 4)).done
    number = driver.give("pause")
    write_result(driver.run.folder, CommandResult(number=number, done=False, step=0, text="withdrawn"))
    until(lambda: not driver.workers.limits[-1].paused_by)
    assert driver.workers.limits[-1].workers == 4
    assert not standing(driver.run.folder).paused_by


def test_a_smaller_limit_waits_for_a_smaller_group(driver: Driver) -> None:
    """A smaller limit waits for a smaller group and an impossible one is refused."""
    number = driver.give("resize", 2)
    assert driver.unanswered(number)
    driver.tell(Started(step=5, world_size=3))
    assert driver.unanswered(number)
    driver.tell(Started(step=5, world_size=2))
    assert driver.result(number).text == "2 workers train"
    refused = driver.result(driver.give("resize", 9))
    assert not refused.done
    assert refused.text == "9 workers: elastic.min_workers is 1 and max_workers 4; resume the run with others"
    assert driver.workers.limits[-1].workers == 2
    last = driver.workers.posted[-1]
    assert isinstance(last, Commanded)
    assert last.refused


@pytest.mark.parametrize(("status", "done"), [("stopped", True), ("finished", True), ("failed", False)])
def test_a_stop_has_failed_if_the_run_has(driver: Driver, status: str, done: bool) -> None:
    number = driver.give("stop")
    until(lambda: GroupRequest.STOP in driver.workers.asked)
    driver.tell(Stopped(step=5, status=status))
    assert driver.result(number).done == done


def test_files_that_are_no_commands_and_gaps_make_nobody_deaf(driver: Driver) -> None:
    folder = Path(driver.run.folder.url) / "control"
    (folder / "0000.json").mkdir(parents=True)
    (folder / "0001.json").symlink_to("nowhere")
    (folder / "00009.json").write_text("{}")
    (folder / "0002.json").write_text('{"number": 999999999, "verb": "save"}')
    (folder / "0006.done.json").write_text("{}")
    number = driver.give("continue")
    assert number == 7
    assert driver.result(number).done
    Controls(driver.run.config, driver.run, Workers())  # a later driver starts


def test_a_later_driver_reads_what_was_left_of_the_limits_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_LOOK_S", 0.02)
    driver = Driver(tmp_path)
    with driver.controls.carried_out():
        driver.tell(Started(step=0, world_size=2), step(1))
        for _ in range(3):
            driver.give("continue")
        driver.give("resize", 2)
        pending = driver.give("pause")
    assert driver.result(pending).text == "the run ended before"
    for number in range(4):  # read no more
        (Path(driver.run.folder.url) / "control" / f"{number:04d}.json").write_text("gone")
    after = Controls(driver.run.config, driver.run, Workers())
    assert after.remarks == ["`springtide run resize` limits it to 2 workers"]
    assert standing(driver.run.folder).following == 5


def test_commands_of_before_hold_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_LOOK_S", 0.02)
    driver = Driver(tmp_path)  # its thread does not run yet
    numbers = [give(driver.run.folder, verb).number for verb in ("pause", "save")]
    later = Controls(driver.run.config, driver.run, driver.workers)
    assert "paused" in later.remarks[0]
    with later.carried_out():
        assert driver.result(numbers[0]).text == "it holds from this start on"
        assert not driver.result(numbers[1]).done
