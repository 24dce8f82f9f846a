"""A second try for tests of real processes, and what passed only then.

Such a test shares two cores with whatever else runs on the machine. One that fails is tried once more; that it passed only then
is said at the end of the run, and more than ``MOST_FLAKY`` of them fail the run: a suite that needs luck is broken.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDERS = ("distributed", "elastic", "benchmarks")
"""Below ``tests``; what lies in them is marked ``processes``."""
MOST_FLAKY = 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what lies in ``FOLDERS``, and give all that is marked a second try."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).parts[0] in FOLDERS:
            item.add_marker("processes")
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.flaky(reruns=1))


def flaky(config: pytest.Config) -> list[str]:
    """Tests that failed and passed when they were tried again, in the order of the run."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return []

    def names(outcome: str) -> list[str]:
        return [report.nodeid for report in reporter.stats.get(outcome, ())]

    failed = {*names("failed"), *names("error")}
    return [name for name in dict.fromkeys(names("rerun")) if name not in failed]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List them."""
    if found := flaky(config):
        terminalreporter.section("flaky tests", yellow=True)
        for name in found:
            terminalreporter.line(f"FLAKY {name}")
        allowed = (
            "that is too many: the run fails" if len(found) > MOST_FLAKY else f"up to {MOST_FLAKY} do not fail the run"
        )
        terminalreporter.line(f"{len(found)} passed at the second try only; {allowed}. Find the race: make flaky")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run for too many; the workers of pytest-xdist leave that to who started them."""
    if not hasattr(session.config, "workerinput") and len(flaky(session.config)) > MOST_FLAKY:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
