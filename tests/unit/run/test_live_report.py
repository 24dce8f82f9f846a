"""A run's report is written anew while the run trains, by a process that its driver never waits for."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from journal_events import step
from live_pages import QUICK, page, writers

from springtide import config as configs
from springtide.events import Started, Stopped
from springtide.run import live_report as module
from springtide.run.folder import Run
from springtide.run.live_report import live_report
from springtide.storage import Folder
from springtide.tracking.journal import Journal

pytestmark = pytest.mark.processes

TIMEOUT_S = 120.0
SLOW_SYNC = """
import os, pathlib, sys, time
sync = os.fsync
def slow(file):
    pathlib.Path(sys.argv[1], "begun").touch()
    time.sleep(1.0)  # longer than the test takes to leave the block
    sync(file)
os.fsync = slow
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRAM", ("-c", QUICK))


def made(root: str) -> Run:
    """A run's folder without events."""
    run = Run(Folder(root) / "shown")
    run.write_config(configs.recipe("tiny").override({"run.id": "shown", "run.root": root}))
    return run


def until(happened: Callable[[], object]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < end_s
        time.sleep(0.02)  # between looks


def last_step(text: str) -> int:
    """The step that a page shows; 0 without a page."""
    found = re.search(r"<dt>steps</dt><dd>(\d+)", text)
    return int(found[1]) if found else 0


def test_the_page_follows_the_journal_until_the_end(tmp_path: Path) -> None:
    """The page follows the journal and its writer is gone at the end."""
    run, said = made(str(tmp_path)), list[str]()
    folder = Path(run.folder.url)
    with Journal(run.folder) as journal:
        with live_report(run.folder, said.append):
            journal(Started(step=0, world_size=2))
            journal(step(1))
            until(lambda: last_step(page(folder)) == 1)
            [writer] = writers(run.folder.url)
            assert os.getpriority(os.PRIO_PROCESS, writer.pid) == 19
            assert "libtorch" not in Path(f"/proc/{writer.pid}/maps").read_text()
            journal(step(2))
            until(lambda: last_step(page(folder)) == 2)
            whole = page(folder)
            assert whole.endswith("</html>\n")
            assert re.search(r"training, as of its last event, \S+ \S+ UTC", whole)
        assert not writer.is_running()
        journal(Stopped(step=2, status="finished"))
    run.write_report()
    assert "finished at step 2" in page(folder)
    assert not list(folder.glob(".tmp-*"))
    assert said == []


def test_a_page_in_an_object_store_follows_the_journal(s3: str) -> None:
    run, said = made(f"{s3}/{uuid.uuid4().hex}"), list[str]()
    with Journal(run.folder) as journal:
        with live_report(run.folder, said.append):
            for number in (1, 2):
                journal(step(number))
                assert journal.flush()
                until(lambda: run.folder.exists("report.html"))
                until(lambda at=number: last_step(run.folder.read("report.html").decode()) == at)
        journal(Stopped(step=2, status="finished"))
    run.write_report()
    assert "finished at step 2" in run.folder.read("report.html").decode()
    assert said == []


def test_a_page_under_way_at_the_end_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is being written at the end is written whole."""
    monkeypatch.setattr(module, "PROGRAM", ("-c", SLOW_SYNC + QUICK))
    run = made(str(tmp_path))
    folder = Path(run.folder.url)
    with Journal(run.folder) as journal, live_report(run.folder, print):
        journal(step(1))
        until((folder / "begun").exists)
    assert last_step(page(folder)) == 1
    assert not list(folder.glob(".tmp-*"))


def test_a_writer_that_hangs_is_killed_before_the_last_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that does not end is killed before the last report."""
    monkeypatch.setattr(module, "_END_S", 0.0)
    run = made(str(tmp_path))
    with Journal(run.folder) as journal, live_report(run.folder, print):
        journal(step(1))
        until(lambda: last_step(page(Path(run.folder.url))) == 1)
        [writer] = writers(run.folder.url)
        writer.send_signal(signal.SIGSTOP)  # as one that waits for its store
        until(lambda: writer.status() == psutil.STATUS_STOPPED)
    assert not writer.is_running()


def test_a_writer_ends_with_its_driver(tmp_path: Path) -> None:
    run = made(str(tmp_path))
    with Journal(run.folder) as journal:
        journal(step(1))
    program = Path(__file__).parents[2] / "programs" / "live_pages.py"
    with subprocess.Popen([sys.executable, str(program), run.folder.url], stdout=subprocess.PIPE) as driver:
        try:
            assert driver.stdout is not None
            writer = psutil.Process(int(driver.stdout.readline()))
            until(lambda: last_step(page(Path(run.folder.url))) == 1)
        finally:
            driver.kill()
    try:
        writer.wait(TIMEOUT_S)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            writer.kill()


def test_a_failure_is_one_line_and_is_tried_again(tmp_path: Path) -> None:
    run, said = made(str(tmp_path)), list[str]()
    config = run.folder.read("config.yaml")
    with Journal(run.folder) as journal:
        run.folder.write("config.yaml", "nonsense: [")
        with live_report(run.folder, said.append):
            journal(step(1))
            until(lambda: said)
            run.folder.write("config.yaml", config)
            until(lambda: last_step(page(Path(run.folder.url))) == 1)
    [line] = said
    assert line.startswith("report.html ")
    assert "config.yaml" in line


@pytest.mark.parametrize(
    ("program", "problem"),
    [("raise SystemExit(3)", "its process ended with status 3"), ("import os; os.kill(os.getpid(), 9)", "status -9")],
)
def test_a_writer_that_dies_is_one_line(
    program: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROGRAM", ("-c", program))
    said = list[str]()
    with live_report(Folder(tmp_path), said.append):
        until(lambda: said)
    [line] = said
    assert line.endswith(problem)


def test_a_writer_that_cannot_be_started_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    said, entered = list[str](), False
    with live_report(Folder(tmp_path), said.append):
        entered = True
    assert entered
    assert said == ["report.html is written only when the run ends: [Errno 2] No such file or directory: 'env'"]
