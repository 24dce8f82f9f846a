"""How a run stands, as a value and on a real terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

import pytest
from journal_events import step

from springtide.cli.main import main
from springtide.cli.run import _Watcher, sparkline
from springtide.config import Config
from springtide.events import Decided, Evaluated, Event, Failed, Left, Saved, Started, Stopped
from springtide.run.folder import Run
from springtide.run.run_status import StatusBuilder, span
from springtide.storage import Folder
from springtide.tracking.journal import Journal
from springtide.tracking.ledger import Prices
from springtide.tracking.timeline import timeline_of

TIMEOUT_S = 60


def decided(decision: str, reason: str, term: int = 1) -> Decided:
    return Decided(step=3, decision=decision, reason=reason, time_s=5.0, term=term)


def state(builder: StatusBuilder) -> str:
    return builder.status(5.0).state


def test_states_follow_the_events() -> None:
    builder = StatusBuilder(10)
    assert state(builder) == "not started"
    for event, expected in (
        (Started(step=0, world_size=2, time_s=1.0, term=1), "starting"),
        (dataclasses.replace(step(1), time_s=2.0, term=1), "training"),
        (decided("stay", "waiting for capacity: room for 0 workers"), "waiting"),
        (decided("start", "2 of 2"), "starting"),
        (decided("stay", "paused by me"), "paused"),
        (Started(step=1, world_size=4, time_s=5.0, term=1), "starting"),
        (dataclasses.replace(step(2), time_s=5.0, term=1, world_size=4), "training"),
        (Stopped(step=2, status="stopped", time_s=5.0, term=1), "stopped"),
    ):
        builder.take(timeline_of([event]))
        assert state(builder) == expected
    assert builder.status(5.0).is_over
    assert builder.status(5.0).sizes == [(0, 2), (1, 4)]
    builder.take(timeline_of([decided("start", "2 of 2", term=2)]))  # --resume
    assert (state(builder), builder.status(5.0).is_over) == ("starting", False)


def test_a_status_has_costs_speed_and_the_age_of_the_checkpoint() -> None:
    builder = StatusBuilder(10, Prices(other=3600.0))
    builder.take(timeline_of([Started(step=0, world_size=2, time_s=10.0, term=1)]))
    for number in (1, 2, 3):
        builder.take(timeline_of([dataclasses.replace(step(number), time_s=10.0 + 0.5 * number, term=1)]))
    saved = Saved(step=3, name="step-0000000003", size_bytes=1, save_time_s=1, time_s=11.5, term=1)
    [said] = builder.take(timeline_of([saved]))
    assert "saved step-0000000003" in said
    found = builder.status(31.5)
    assert (found.step, found.num_steps, found.workers, found.left_s) == (3, 10, 2, 3.5)
    assert (found.checkpoint, found.checkpoint_age_s) == ("step-0000000003", 20.0)
    assert found.dollars == pytest.approx(1.5 * 2)
    assert found.diagnosis.findings[0].describe().startswith("data, 20.0%")
    assert found.diagnosis.spent == {"productive": pytest.approx(0.8), "data_stall": pytest.approx(0.2)}
    assert found.waits_for == ""
    silent = builder.status(131.5)
    assert (silent.state, silent.waits_for[:18]) == ("training", "no event for 2 min")


def test_a_status_says_what_is_waited_for() -> None:
    builder = StatusBuilder(10)
    trained: list[Event] = [dataclasses.replace(step(number), time_s=2.0, term=1) for number in (1, 2, 3)]
    again = Failed(step=3, cause="lost nodes", reason="one is gone", again=True, time_s=3.0, term=1)
    for event, expected in (
        (
            decided("stay", "room for 1 of 2 workers; more nodes may be joining"),
            "room for 1 of 2 workers; more nodes may",
        ),
        (decided("start", "2 of 2 workers"), "start: 2 of 2 workers"),
        (Started(step=0, world_size=2, time_s=1.0, term=1), "the first step of 2 workers"),
        (decided("stay", "2 workers train"), "the first step of 2 workers"),
        (trained[0], ""),
        (decided("stay", "room for 4 workers instead of 2, elastic.grow is 'never'"), ""),
        (decided("leave", "a node goes"), "leave: a node goes"),
        (trained[1], ""),
        (Left(step=2, kept_in="memory", time_s=2.0, term=1), "a new worker group"),
        (decided("stay", "waiting for capacity: room for 0 workers"), "capacity: room for 0 workers"),
        (Started(step=2, world_size=2, time_s=2.0, term=1), "the first step of 2 workers"),
        (trained[2], ""),
        (again, "a new worker group, after lost nodes"),
        (
            decided("stay", "room for 1 of 2 workers; more nodes may be joining"),
            "room for 1 of 2 workers; more nodes may",
        ),
        (decided("stay", "paused by me, and holds no workers"), "paused by me, and holds no workers"),
        (Stopped(step=3, status="stopped", time_s=5.0, term=1), ""),
    ):
        builder.take(timeline_of([event]))
        found = builder.status(5.0).waits_for
        assert found[: len(expected)] == expected
        assert bool(found) == bool(expected), (event, found)


def test_a_status_has_the_last_evaluation_and_counts_restarts() -> None:
    builder = StatusBuilder(10)
    assert (builder.status(5.0).heldout_loss, builder.status(5.0).restarts) == (None, 0)
    evaluated = Evaluated(step=2, heldout_loss=2.5, heldout_bits_per_byte=1.0, rows=1, time_s=2.0, term=1)
    for events in (
        [Started(step=0, world_size=2, time_s=1.0, term=1), dataclasses.replace(step(1), time_s=1.5, term=1)],
        [dataclasses.replace(step(2), time_s=2.0, term=1), evaluated],
        [Failed(step=2, cause="hung", reason="no step", again=True, time_s=3.0, term=1)],
        [Started(step=1, world_size=1, time_s=4.0, term=1), dataclasses.replace(step(2), time_s=4.5, term=1)],
    ):
        builder.take(timeline_of(events))
    found = builder.status(5.0)
    assert (found.heldout_loss, found.heldout_step) == (2.5, 2)
    assert (found.restarts, found.steps_lost) == (1, 1)
    assert found.last_restart is not None
    assert (found.last_restart.workers_before, found.last_restart.workers_after) == (2, 1)


def test_the_curve_of_a_long_run_has_bounded_points() -> None:
    """The curve of a long run has a bounded number of points."""
    builder = StatusBuilder(10_000)
    for first in (1, 2, 2501):  # a journal is read in parts
        last = {1: 1, 2: 2500, 2501: 5000}[first]
        builder.take(timeline_of([step(number, loss=5.0 - number / 1000) for number in range(first, last + 1)]))
    losses = builder.status(0.0).losses
    assert 64 <= len(losses) <= 129
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(5.0, abs=0.1)
    assert losses[-1] == pytest.approx(0.0, abs=0.1)


def test_lines_and_durations_for_people() -> None:
    assert sparkline([1.0, 2.0, 3.0, 8.0], 4) == "▁▂▃█"
    assert sparkline([], 4) == ""
    assert sparkline([2.0] * 9, 4) == "▁▁▁▁"
    assert sparkline([1.0, 8.0], 40, "_#") == "_#"
    assert [span(one) for one in (7.4, 90.0, 7200.0, 200_000.0)] == ["7 s", "2 min", "2.0 h", "2.3 d"]


@pytest.fixture
def run(tiny: Config) -> Run:
    """A run of ten steps that has done nothing yet."""
    config = tiny.override({"train.total": 10 * tiny.tokens_per_step, "optim.warmup": 0})
    run = Run(Folder(config.run.root) / "mine")
    run.write_config(config)
    return run


def test_one_status_as_text_and_json_and_clear_words(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["run", "status", run.folder.url]) == 0
    assert "not started" in capsys.readouterr().out
    with Journal(run.folder) as journal:
        journal(Started(step=0, world_size=2, remark="\x1b[31mred " + "long " * 50))
        for number in range(1, 6):
            journal(step(number))
        journal(Evaluated(step=5, heldout_loss=1.25, heldout_bits_per_byte=0.5, rows=2))
    assert main(["run", "status", run.folder.url]) == 0
    said = capsys.readouterr().out
    assert "5/10" in said
    assert "1.2500 at step 5" in said
    assert "\x1b" not in said
    assert max(map(len, said.splitlines())) <= 60
    assert main(["run", "status", run.folder.url, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run"], shown["step"], shown["workers"]) == ("mine", 5, 2)
    assert (shown["heldout_loss"], shown["restarts"], shown["last_restart"]) == (1.25, 0, None)
    assert main(["run", "status", f"{run.folder.url}-not"]) == 2
    assert "run's folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["run", "status", run.folder.url, "--json", "--follow"])


PROGRAM = """
import sys
from springtide.cli import main, run
run._LOOK_S = 0.05
sys.exit(main.main(["run", "status", sys.argv[1], "--follow"]))
"""


def command(run: Run) -> list[str]:
    return [sys.executable, "-c", PROGRAM, run.folder.url]


@pytest.mark.processes
def test_without_a_terminal_each_change_is_a_line(run: Run) -> None:
    """Without a terminal each change is a line and the end ends it."""
    with Journal(run.folder) as journal:
        journal(Started(step=0, world_size=2))
        with subprocess.Popen(command(run), stdout=subprocess.PIPE, text=True) as watcher:
            assert watcher.stdout is not None
            first = watcher.stdout.readline()
            assert first.startswith("step 0/10  starting  2 workers  0 restarts")
            assert first.endswith("waits for the first step of 2 workers\n")
            journal(step(1))
            line = watcher.stdout.readline()
            assert line.startswith("step 1/10  training  loss 1.0000  20 tokens/s  MFU 50%  2 workers")
            journal(Stopped(step=1, status="stopped", reason="asked"))
            rest = watcher.stdout.read()
            assert watcher.wait(TIMEOUT_S) == 0
    assert "step 1: stopped: asked" in rest
    assert "\x1b" not in line + rest


def test_each_look_reads_only_what_is_new(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    whole, part = Folder.read, Folder.read_range

    def counted(found: bytes | memoryview) -> bytes | memoryview:
        read.append(len(found))
        return found

    monkeypatch.setattr(Folder, "read", lambda folder, name: counted(whole(folder, name)))
    monkeypatch.setattr(Folder, "read_range", lambda folder, name, a, b: counted(part(folder, name, a, b)))
    with Journal(run.folder) as journal:
        journal(Started(step=0, world_size=2))
        for number in range(1, 6):
            journal(step(number))
        journal.flush()
        looks = _Watcher(run).looks(0.0)
        assert next(looks)[1].step == 5
        read.clear()
        journal(step(6))
        journal.flush()
        size = len(run.folder.read("journal/0001-0000.jsonl"))
        read.clear()
        assert next(looks)[1].step == 6
        assert 0 < sum(read) < size / 4
        read.clear()
        assert next(looks)[1].step == 6
        assert sum(read) == 0
        journal(Stopped(step=6, status="stopped"))
    assert next(looks)[1].is_over
    assert list(looks) == []


@pytest.mark.processes
def test_a_narrow_terminal_is_refreshed_in_place(run: Run) -> None:
    """On a narrow terminal it is refreshed in place and ctrl c ends it well."""
    main_end, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 60, 0, 0))
    environment = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"NO_COLOR": "1", "TERM": "xterm-256color"}
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + TIMEOUT_S
        while text not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(main_end, 65536).decode(errors="replace")

    with Journal(run.folder) as journal:
        journal(Started(step=0, world_size=2))
        journal(step(1))
        with subprocess.Popen(
            command(run), stdin=terminal, stdout=terminal, stderr=terminal, env=environment
        ) as watcher:
            os.close(terminal)
            try:
                until("1/10")
                journal(step(2))
                until("2/10")
                watcher.send_signal(signal.SIGINT)
                assert watcher.wait(TIMEOUT_S) == 0
            finally:
                watcher.kill()
                os.close(main_end)
    assert "\x1b[1A" in seen  # the cursor goes up: in place
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", seen)  # no colour
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert max(map(len, plain.splitlines())) <= 60


def test_a_damaged_or_foreign_folder_is_told_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("a: [")
    assert main(["run", "status", str(tmp_path)]) == 2
    assert "config.yaml" in capsys.readouterr().err
