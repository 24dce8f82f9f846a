"""Wall and CPU seconds by folder, and the slowest tests, printed at the end of a run with ``--times``. No time fails a run.

CPU seconds are those of the process that runs the test and of the children that it has waited for. A child that outlives its
test counts for the test during which it ends. Children of other processes do not count: Ray's workers, and gloo ranks, which a
forkserver starts. Each phase's report carries its CPU seconds as a user property, which pytest-xdist passes on.
"""

from __future__ import annotations

import dataclasses
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

CPU_S = "cpu_s"
SLOWEST = 10


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def folder_of(test: str) -> str:
    """Return the folder that a test counts for: tests/unit/<package>, tests/elastic."""
    return "/".join(PurePosixPath(test.partition("::")[0]).parent.parts[:3]) or "."


@dataclasses.dataclass
class Spent:
    """Seconds of some phases of tests."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    tests: int = 0


class Times:
    """The plugin: measures where tests run, adds up where their reports arrive."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self.by_test: dict[str, Spent] = defaultdict(Spent)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Start counting."""
        self._since_s = cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Put the CPU seconds since the last phase on the report."""
        report = yield
        now_s = cpu_s()
        report.user_properties.append((CPU_S, now_s - self._since_s))
        self._since_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase to its test; each try of a test that was tried twice counts."""
        spent = self.by_test[report.nodeid]
        spent.wall_s += report.duration
        spent.cpu_s += sum(float(str(value)) for name, value in report.user_properties if name == CPU_S)

    def by_folder(self) -> dict[str, Spent]:
        """Add up the tests of each folder."""
        found: dict[str, Spent] = defaultdict(Spent)
        for test, spent in self.by_test.items():
            folder = found[folder_of(test)]
            folder.wall_s += spent.wall_s
            folder.cpu_s += spent.cpu_s
            folder.tests += 1
        return found

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print both tables."""
        if not self.by_test:
            return
        terminalreporter.section("seconds by folder")
        terminalreporter.line(f"{'wall':>8} {'CPU':>8} {'tests':>6}  folder")
        for folder, spent in sorted(self.by_folder().items()):
            terminalreporter.line(f"{spent.wall_s:8.1f} {spent.cpu_s:8.1f} {spent.tests:6d}  {folder}")
        terminalreporter.section("slowest tests")
        terminalreporter.line(f"{'wall':>8} {'CPU':>8}  test")
        for test, spent in sorted(self.by_test.items(), key=lambda one: -one[1].wall_s)[:SLOWEST]:
            terminalreporter.line(f"{spent.wall_s:8.1f} {spent.cpu_s:8.1f}  {test}")
