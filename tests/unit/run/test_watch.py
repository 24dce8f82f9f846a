"""What a run does now, as a value and on a real terminal."""

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
from springtide.cli.watch import sparkline
from springtide.config import Config
from springtide.events import Decided, Saved, Started, Stopped
from springtide.run.folder import Run
from springtide.run.watch import WatchedRun, span
from springtide.store import Folder
from springtide.track.journal import Journal
from springtide.track.ledger import Prices
from springtide.track.timeline import timeline_of

TIMEOUT_S = 60


def decided(decision: str, reason: str, term: int = 1) -> Decided:
    return Decided(step=3, decision=decision, reason=reason, time_s=5.0, term=term)


def state(watched: WatchedRun, now_s: float = 5.0) -> str:
    return watched.picture(now_s).state


def test_states_follow_the_events() -> None:
    watched = WatchedRun(10)
    assert state(watched) == "not started"
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
        watched.take(timeline_of([event]))
        assert state(watched) == expected
    assert watched.picture(5.0).is_over
    assert watched.picture(5.0).sizes == [(0, 2), (1, 4)]
    watched.take(timeline_of([decided("start", "2 of 2", term=2)]))  # --resume
    assert (state(watched), watched.picture(5.0).is_over) == ("starting", False)


def test_a_picture_has_costs_speed_and_the_age_of_the_checkpoint() -> None:
    watched = WatchedRun(10, Prices(other=3600.0))
    watched.take(timeline_of([Started(step=0, world_size=2, time_s=10.0, term=1)]))
    for number in (1, 2, 3):
        watched.take(timeline_of([dataclasses.replace(step(number), time_s=10.0 + 0.5 * number, term=1)]))
    saved = Saved(step=3, name="step-0000000003", size_bytes=1, save_time_s=1, time_s=11.5, term=1)
    [said] = watched.take(timeline_of([saved]))
    assert "saved step-0000000003" in said
    found = watched.picture(31.5)
    assert (found.step, found.num_steps, found.workers, found.left_s) == (3, 10, 2, 3.5)
    assert (found.checkpoint, found.checkpoint_age_s) == ("step-0000000003", 20.0)
    assert found.dollars == pytest.approx(1.5 * 2)
    assert found.limit.startswith("data, 20.0%")
    assert "no event for" not in found.state
    assert "no event for 2 min" in watched.picture(131.5).state


def test_the_curve_of_a_long_run_has_a_bounded_number_of_points() -> None:
    watched = WatchedRun(10_000)
    for first in (1, 2, 2501):  # a journal is read in parts
        last = {1: 1, 2: 2500, 2501: 5000}[first]
        watched.take(timeline_of([step(number, loss=5.0 - number / 1000) for number in range(first, last + 1)]))
    losses = watched.picture(0.0).losses
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


def test_one_picture_as_text_and_json_and_clear_words(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["run", "watch", run.folder.url, "--once"]) == 0
    assert "not started" in capsys.readouterr().out
    with Journal(run.folder) as journal:
        journal(Started(step=0, world_size=2, remark="\x1b[31mred " + "long " * 50))
        for number in range(1, 6):
            journal(step(number))
    assert main(["run", "watch", run.folder.url, "--once"]) == 0
    said = capsys.readouterr().out
    assert "5/10" in said
    assert "\x1b" not in said
    assert max(map(len, said.splitlines())) <= 60
    assert main(["run", "watch", run.folder.url, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run"], shown["step"], shown["workers"]) == ("mine", 5, 2)
    assert main(["run", "watch", f"{run.folder.url}-not", "--once"]) == 2
    assert "is not a run's folder" in capsys.readouterr().err
    assert main(["run", "watch", run.folder.url, "--every", "-1"]) == 2


def command(run: Run) -> list[str]:
    return [sys.executable, "-m", "springtide.cli.main", "run", "watch", run.folder.url, "--every", "0.05"]


def test_without_a_terminal_each_change_is_a_line_and_the_end_ends_it(run: Run) -> None:
    with Journal(run.folder) as journal:
        journal(Started(step=0, world_size=2))
        with subprocess.Popen(command(run), stdout=subprocess.PIPE, text=True) as watcher:
            assert watcher.stdout is not None
            assert watcher.stdout.readline().startswith("step 0/10  starting")
            journal(step(1))
            line = watcher.stdout.readline()
            assert line.startswith("step 1/10  training  loss 1.0000  20 tokens/s  MFU 50%  2 workers")
            journal(Stopped(step=1, status="stopped", reason="asked"))
            rest = watcher.stdout.read()
            assert watcher.wait(TIMEOUT_S) == 0
    assert "step 1: stopped: asked" in rest
    assert "\x1b" not in line + rest


def test_on_a_narrow_terminal_it_is_refreshed_in_place_and_ctrl_c_ends_it_well(run: Run) -> None:
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
    assert main(["run", "watch", str(tmp_path), "--once"]) == 2
    assert "config.yaml" in capsys.readouterr().err
