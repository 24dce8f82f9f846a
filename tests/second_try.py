"""A second try for tests whose processes share two cores with everything else, and a list of what passed only then.

A test in ``process_guard.FOLDERS``, or marked ``second_try``, is tried once more if it fails. Tests that pass only then are
listed at the end of the run, and more than ``MOST_FLAKY`` of them fail the run: a suite that needs luck is broken. No new test
gets the mark: find the race instead.
"""

from __future__ import annotations

import pytest
from process_guard import in_folders

MOST_FLAKY = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests their second try."""
    for item in items:
        if in_folders(item) or item.get_closest_marker("second_try"):
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
        terminalreporter.line(
            f"{len(found)} passed at the second try only; {allowed}. Find the race: make long SUBJECT=repeated"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run for too many; the workers of pytest-xdist leave that to who started them."""
    if not hasattr(session.config, "workerinput") and len(flaky(session.config)) > MOST_FLAKY:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
