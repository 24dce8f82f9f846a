"""A test that starts a process without a mark fails."""

from __future__ import annotations

import pytest

pytest_plugins = "pytester"
pytestmark = pytest.mark.processes
HEAD = """
import multiprocessing, os, subprocess
import pytest

def start():
    subprocess.run(["true"], check=True)
"""
UNMARKED = {
    "popen": "def test_it(): start()",
    "swallowed": """
def test_it():
    try:
        start()
    except BaseException:
        pass
""",
    "system": "def test_it(): os.system('true')",
    "fork": """
def test_it():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
""",
    "spawn": "def test_it(): os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)",
    "multiprocessing": """
def test_it():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
""",
    "fixture": """
@pytest.fixture
def started(): start()
def test_it(started): pass
""",
    "end_of_a_fixture": """
@pytest.fixture
def started():
    yield
    start()
def test_it(started): pass
""",
}
ALLOWED = """
@pytest.mark.processes
def test_marked(): start()

@pytest.fixture(scope="session")
def s3(): start()
def test_fixture_that_is_listed(s3): pass

def test_without_a_process(): pass
"""


def run(pytester: pytest.Pytester, tests: str) -> pytest.RunResult:
    pytester.makeini("[pytest]\nmarkers = processes: starts processes")
    pytester.makepyfile(HEAD + tests)
    return pytester.runpytest_inprocess("-p", "process_guard", "-p", "no:cacheprovider")


@pytest.mark.parametrize("how", UNMARKED)
def test_an_unmarked_test_that_starts_a_process_fails(pytester: pytest.Pytester, how: str) -> None:
    done = run(pytester, UNMARKED[how])
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines("*starts processes, but is not marked*")


def test_marks_and_listed_fixtures_allow_processes(pytester: pytest.Pytester) -> None:
    run(pytester, ALLOWED).assert_outcomes(passed=3)


def test_a_test_is_named_for_its_own_processes_only(pytester: pytest.Pytester) -> None:
    done = run(pytester, f"{UNMARKED['popen']}\ndef test_next(): pass")
    done.assert_outcomes(failed=1, passed=1)
