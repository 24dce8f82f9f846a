"""Commands to a run: written once, answered once, found by any driver, refused where nobody can carry them out."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from springtide.checkpoint import leases
from springtide.errors import CommandFailed, ConfigError, DamagedFile
from springtide.run.control import (
    CommandResult,
    RunControl,
    Verb,
    await_result,
    give,
    has_command,
    numbers_from,
    read_command,
    read_result,
    standing,
    write_result,
)
from springtide.storage import Folder

DONE: dict[str, Any] = {"done": True, "step": 3, "text": "done"}


def trained(path: Path) -> Folder:
    """A run whose driver holds it."""
    run = Folder(path / "run")
    leases.claim(run, "driver", trains=False)
    return run


def test_a_command_is_written_once_and_answered_once(tmp_path: Path) -> None:
    run = trained(tmp_path)
    assert not has_command(run, 0)
    one = give(run, "resize", 3)
    assert has_command(run, 0)
    assert read_command(run, 0) == one
    assert (one.number, one.verb, one.workers) == (0, "resize", 3)
    assert "@" in one.caller
    assert read_result(run, 0) is None
    assert write_result(run, CommandResult(number=0, **DONE))
    assert not write_result(run, CommandResult(number=0, done=False, step=9, text="too late"))
    assert await_result(run, one, 0.0).step == 3


def test_callers_at_the_same_moment_get_numbers_of_their_own(tmp_path: Path) -> None:
    run, found = trained(tmp_path), list[int]()
    threads = [threading.Thread(target=lambda: found.append(give(run, "save").number)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))


def test_who_gets_no_answer_withdraws_the_command(tmp_path: Path) -> None:
    run = trained(tmp_path)
    one = give(run, "pause")
    with pytest.raises(CommandFailed, match=r"pause: .*0\.01 s"):
        await_result(run, one, 0.01)
    assert not write_result(run, CommandResult(number=0, **DONE))
    assert standing(run).paused_by == ""


def test_nobody_commands_a_run_that_no_driver_trains(tmp_path: Path) -> None:
    run = Folder(tmp_path / "run")
    with pytest.raises(CommandFailed, match="trained"):
        give(run, "save")
    lease = leases.claim(run, "driver", trains=False)
    give(run, "save")
    leases.claim(run, "driver")  # its worker group
    give(run, "save")
    leases.end(run, lease.term)
    with pytest.raises(CommandFailed, match=r"\(lease 1\)"):
        give(run, "stop")
    alone = Folder(tmp_path / "torchrun")
    leases.claim(alone, "rank 0")
    with pytest.raises(CommandFailed, match="torchrun"):
        give(alone, "save")
    assert not (alone / "control").names()


@pytest.mark.parametrize(
    ("verb", "workers", "problem"),
    [("leave", 0, "is not a command"), ("note", 0, "is not a command"), ("resize", -1, "is not a number of workers")],
)
def test_a_bad_command_is_refused_before_it_is_written(verb: Verb, workers: int, problem: str, tmp_path: Path) -> None:
    run = trained(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        give(run, verb, workers)
    assert not (run / "control").names()


def test_commands_of_earlier_versions_still_hold(tmp_path: Path) -> None:
    """They have a text each; a note among them, with or without its result, is passed over."""
    run = trained(tmp_path)
    shared = {"format": 1, "caller": "me@here", "time_s": 1.7e9, "workers": 0, "text": ""}
    for number, (verb, more) in enumerate(
        (("resize", {"workers": 3}), ("pause", {}), ("note", {"text": "halfway"}), ("note", {"text": "again"}))
    ):
        (run / "control").write(f"{number:04d}.json", json.dumps({**shared, "number": number, "verb": verb, **more}))
    for number in range(3):
        write_result(run, CommandResult(number=number, **DONE))
    found = standing(run)
    assert (found.workers, found.paused_by, found.unanswered, found.following) == (3, "me@here", (3,), 4)


@settings(max_examples=40)
@given(
    some.lists(
        some.tuples(some.sampled_from(["pause", "continue", "resize", "save"]), some.integers(0, 9), some.booleans())
    )
)
def test_the_newest_limit_and_the_newest_pause_hold(
    tmp_path_factory: pytest.TempPathFactory, given_before: list[tuple[Verb, int, bool]]
) -> None:
    run, workers, paused = trained(tmp_path_factory.mktemp("run")), 0, False
    for verb, number, done in given_before:
        one = give(run, verb, number)
        write_result(run, CommandResult(number=one.number, done=done, step=0, text=""))
        workers = number if done and verb == "resize" else workers
        paused = verb == "pause" if done and verb in ("pause", "continue") else paused
    found = standing(run)
    assert (found.workers, bool(found.paused_by)) == (workers, paused)
    assert (found.unanswered, found.following) == ((), len(given_before))


def test_unanswered_commands_count_and_damaged_ones_do_not(tmp_path: Path) -> None:
    """What is not answered yet counts and what is damaged does not."""
    run = trained(tmp_path)
    give(run, "resize", 5)
    give(run, "pause")
    (run / "control").write("0002.json", json.dumps({"verb": "resize", "workers": 1}))
    (run / "control").write("README.md", "not a command")
    with pytest.raises(DamagedFile, match=r"0002\.json"):
        read_command(run, 2)
    found = standing(run)
    assert (found.workers, bool(found.paused_by), found.unanswered, found.following) == (5, True, (0, 1, 2), 3)


@pytest.mark.parametrize("stray", ["999999999.json", "999999999.done.json", "012345.json", "12345.json"])
def test_a_number_far_ahead_keeps_nobody_from_giving_commands(tmp_path: Path, stray: str) -> None:
    run = trained(tmp_path)
    for before in (0, 1):
        (run / "control").write(stray, json.dumps({"number": 1}))
        assert give(run, "resize", 3).number == before
    assert (standing(run).following, standing(run).workers, standing(run).unanswered) == (2, 3, (0, 1))
    assert numbers_from(run, 1) == [1]


def test_numbers_that_are_gone_are_not_given_again(tmp_path: Path) -> None:
    """Somebody removed old commands to save room."""
    run = trained(tmp_path)
    (run / "control").write("9000.done.json", "{}")
    assert give(run, "save").number == 9001


def test_a_run_passes_commands_on_and_fails_as_they_do(tmp_path: Path) -> None:
    control, refusal = RunControl(), "9 workers: elastic.max_workers is 4"
    control.folder = run = trained(tmp_path)
    verbs = list[str]()

    def answer() -> None:
        """As a driver would."""
        for number in range(5):
            while not has_command(run, number):
                time.sleep(0.01)
            verbs.append(read_command(run, number).verb)
            text = refusal if number == 0 else "done"
            write_result(run, CommandResult(number=number, done=number > 0, step=3, text=text))
        leases.end(run, 1)  # whoever stops a run waits until its driver has let go

    driver = threading.Thread(target=answer)
    driver.start()
    with pytest.raises(CommandFailed, match=f"resize: {refusal}"):
        control.resize(9)
    assert all(act().done for act in (control.save, control.pause, control.unpause, control.stop))
    driver.join()
    assert verbs == ["resize", "save", "pause", "continue", "stop"]


def test_a_new_command_takes_no_result_of_one_that_is_gone(tmp_path: Path) -> None:
    run = trained(tmp_path)
    for _ in range(2):
        one = give(run, "save")
        write_result(run, CommandResult(number=one.number, **DONE))
    (run / "control").remove("0001.json")
    assert standing(run).following == 2
    assert give(run, "stop").number == 2
