"""``make long`` resumes after the steps that passed, says what it skips, and ends what it started."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import long
import psutil
import pytest
from long import State, Step, Subject, run

pytestmark = pytest.mark.processes
SLEEPER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""
INTERRUPTED = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(long.__file__).parent)!r})
import long
steps = (long.Step("first", ("true",)), long.Step("second", (sys.executable, "-c", {SLEEPER!r})))
long.SUBJECTS["it"] = long.Subject(1, "for a test", steps)
sys.exit(long.main())
"""


def step(name: str, folder: Path, code: str = "", needs: tuple[str, ...] = ()) -> Step:
    """Return a step that writes a line to a file of its name."""
    write = f"open({str(folder / name)!r}, 'a').write('ran\\n'); print('log of {name}'); {code}"
    return Step(name, (sys.executable, "-c", write), needs=needs)


def test_a_second_call_runs_what_did_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails_once = f"import os; sys = __import__('sys'); sys.exit(not os.path.exists({str(tmp_path / 'mended')!r}))"
    steps = (step("good", tmp_path), step("bad", tmp_path, fails_once), step("last", tmp_path))
    subject = Subject(1, "for a test", steps)
    assert run(subject, State(tmp_path / "state"), minutes=1) == 1
    told = capsys.readouterr().out
    assert "log of bad" in told
    assert "log of good" not in told
    assert re.search(r"bad +\d+  failed with status 1", told)
    (tmp_path / "mended").touch()
    assert run(subject, State(tmp_path / "state"), minutes=1) == 0
    assert "passed earlier" in capsys.readouterr().out
    runs = {name: (tmp_path / name).read_text().count("ran") for name in ("good", "bad", "last")}
    assert runs == {"good": 1, "bad": 2, "last": 1}


def test_what_lacks_a_program_is_skipped_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subject = Subject(1, "for a test", (step("slurm", tmp_path, needs=("true", "no-such-program")),))
    assert run(subject, State(tmp_path / "state"), minutes=1) == 0
    assert "skipped: needs no-such-program" in capsys.readouterr().out
    assert not (tmp_path / "slurm").exists()


def test_no_step_starts_after_the_minutes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subject = Subject(1, "for a test", (step("late", tmp_path),))
    assert run(subject, State(tmp_path / "state"), minutes=-1) == long.UNFINISHED
    assert "not started: call again" in capsys.readouterr().out


def test_a_step_that_hangs_is_stopped(tmp_path: Path) -> None:
    step = Step("hangs", (sys.executable, "-c", "import time; time.sleep(600)"))
    assert long.run_step(step, tmp_path / "log", limit_s=0.2) == "stopped after 0 s"


def test_ctrl_c_ends_the_step_and_keeps_what_passed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, "it", "--results", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(family := psutil.Process(process.pid).children(recursive=True)) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)  # until the second step and its child are there
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"first +\d+  passed", told)
    assert re.search(r"second +\d+  interrupted", told)
    assert not psutil.wait_procs(family, timeout=10)[1]
    [state] = tmp_path.glob("*/it")
    assert State(state).passed_s.keys() == {"first"}


def test_every_subject_takes_an_hour_at_most_and_names_files_that_exist() -> None:
    for subject in long.SUBJECTS.values():
        assert subject.minutes <= 60
        names = [step.name for step in subject.steps]
        assert len(set(names)) == len(names)
        for step in subject.steps:
            folder = long.REPOSITORY / step.folder
            paths = [one.removeprefix("--ignore=") for one in step.command if "tests/" in one or one.endswith(".py")]
            assert [one for one in paths if not (folder / one).exists()] == []
