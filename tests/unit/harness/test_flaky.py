"""``make long SUBJECT=repeated`` counts failures over rounds, goes on where it was, and takes along what it has started."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.processes

SCRIPT = str(Path(__file__).parents[2] / "flaky.py")
TESTS = """
import pathlib, pytest, time
pytestmark = pytest.mark.processes
here = pathlib.Path(__file__).parent

def test_second_round_fails():
    with (here / "rounds").open("a") as file:
        file.write("x")
    assert len((here / "rounds").read_text()) != 2

def test_steady():
    pass

@pytest.mark.skipif((here / "rounds").exists(), reason="the one above runs first")
def test_hangs():
    (here / "hangs").touch()
    time.sleep(600)
"""


def start(folder: Path, test: str) -> subprocess.Popen[str]:
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, SCRIPT, "--rounds", "2", "--results", str(folder / "found"), "--nice", "19", "--"]
    options = ["-p", "no:cacheprovider", "-W", "ignore", str(folder / "test_it.py"), "-k", test]
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)


@pytest.mark.full
def test_a_test_that_fails_in_one_of_two_rounds_is_found_and_no_round_is_run_twice(tmp_path: Path) -> None:
    for _ in range(2):
        process = start(tmp_path, "second or steady")
        told, _ = process.communicate(timeout=120)
        assert process.returncode == 1
        rows = [line.split() for line in told.splitlines() if "::" in line]
        assert [(runs, failures, test.split("::")[1]) for runs, failures, test in rows] == [
            ("2", "1", "test_second_round_fails"),
            ("2", "0", "test_steady"),
        ]
        assert "1 of 2 tests failed at least once in 2 rounds" in told
    assert (tmp_path / "rounds").read_text() == "xx"
    [log] = (tmp_path / "found").rglob("*second*.txt")
    assert "round-02" in str(log)
    assert "assert 2 != 2" in log.read_text()


@pytest.mark.full
def test_ctrl_c_ends_what_it_started_and_the_round_does_not_count(tmp_path: Path) -> None:
    process = start(tmp_path, "hangs")
    deadline = time.monotonic() + 60
    while not (tmp_path / "hangs").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)  # until the test stands in it
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) > (psutil.cpu_count() or 1)  # pytest, and a busy process for each core
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert not list((tmp_path / "found").rglob("result.json"))
