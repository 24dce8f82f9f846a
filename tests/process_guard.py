"""A test that starts a process without a mark that says so fails.

Processes make a test slow, dependent on the load of the machine, and hard to stop. Three ways say that a test starts some:

- the mark ``processes``, on the test or its module (``distributed`` and ``cluster`` say it, too);
- its folder: everything in ``FOLDERS`` is marked;
- a fixture that starts one for many tests: whoever uses one of ``FIXTURES`` is marked.

An audit hook sees every start, also of ``git`` and in code of other packages. It does not stop the start, because an error
raised there could be swallowed: the test fails at the end of its setup, call or teardown. The spawn and forkserver methods of
multiprocessing raise no audit event in CPython 3.11, so ``Process.start`` is wrapped.
"""

from __future__ import annotations

import multiprocessing.process
import os
import platform
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

EVENTS = frozenset(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"))
MARKS = ("processes", "distributed", "cluster")
FOLDERS = ("distributed", "elastic", "benchmarks")
"""Below ``tests``."""
FIXTURES = ("s3", "small_disk", "ray_cluster")
"""Session fixtures: the test that happens to come first pays for the start."""


class Guard:
    """Records process starts while an unmarked test runs."""

    def __init__(self) -> None:
        self._is_installed = False
        self._watches = False
        self._pid = 0
        self._started: list[str] = []

    def install(self) -> None:
        """Add the audit hook, which stays as long as this process."""
        self._pid = os.getpid()
        if self._is_installed:
            return
        self._is_installed = True
        platform.processor()  # starts uname once per process, for whoever asks first

        def on_event(event: str, arguments: tuple[object, ...]) -> None:
            if event in EVENTS:  # thousands of other events a second come here
                self._record(event, str(arguments[1] if len(arguments) > 1 else "")[:200])

        sys.addaudithook(on_event)
        start = multiprocessing.process.BaseProcess.start

        def watched(process: multiprocessing.process.BaseProcess) -> None:
            self._record("multiprocessing", process.name)
            start(process)

        multiprocessing.process.BaseProcess.start = watched  # type: ignore[method-assign]

    def watch(self, on: bool) -> tuple[bool, list[str]]:
        """Set whether starts are recorded from now on; returns what to restore afterwards."""
        before = self._watches, self._started
        self._watches, self._started = on, []
        return before

    def restore(self, before: tuple[bool, list[str]]) -> None:
        """Go back to the test around this one: tests of pytest plugins run pytest in this process."""
        self._watches, self._started = before

    def check(self) -> None:
        """Fail if a process was started since the last check."""
        started, self._started = self._started, []
        if started:
            pytest.fail(
                "this test starts processes, but is not marked with pytest.mark.processes:\n" + "\n".join(started),
                pytrace=False,
            )

    def _record(self, event: str, what: str) -> None:
        if not self._watches or os.getpid() != self._pid:  # a forked child is on its own
            return
        here = str(Path(__file__).parents[1])
        ours = [
            frame
            for frame in traceback.extract_stack()
            if frame.filename.startswith(here) and ".venv" not in frame.filename
        ]
        ours = [frame for frame in ours if frame.filename != __file__]
        place = f" at {os.path.relpath(ours[-1].filename, here)}:{ours[-1].lineno}" if ours else ""
        self._started.append(f"{event} {what}{place}")


GUARD = Guard()


def starts_processes(item: pytest.Item) -> bool:
    """Return True if a mark of the test says that it starts processes."""
    return any(item.get_closest_marker(mark) for mark in MARKS)


def pytest_configure(config: pytest.Config) -> None:
    """Install the hook."""
    GUARD.install()


def in_folders(item: pytest.Item) -> bool:
    """Return True if a test is in one of ``FOLDERS``."""
    here = Path(__file__).parent
    return item.path.is_relative_to(here) and item.path.relative_to(here).parts[0] in FOLDERS


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder and by their fixtures."""
    for item in items:
        if in_folders(item) or not set(FIXTURES).isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("processes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch from before the test's fixtures until after them."""
    before = GUARD.watch(not starts_processes(item))
    try:
        return (yield)
    finally:
        GUARD.restore(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Check what the fixtures started."""
    result = yield
    GUARD.check()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Check what the test started."""
    result = yield
    GUARD.check()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Check what the ends of the fixtures started."""
    result = yield
    GUARD.check()
    return result
