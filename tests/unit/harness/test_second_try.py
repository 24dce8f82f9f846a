"""A test with a second try is tried twice, what passed only then is named, and three of them fail the run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = "pytester"
pytestmark = pytest.mark.processes
TESTS = """
import pathlib, pytest

def passes_at(number, name):
    tries = pathlib.Path(__file__).with_name(f"tries-{name}")
    with tries.open("a") as file:
        file.write("x")
    assert len(tries.read_text()) >= number

@pytest.mark.second_try
@pytest.mark.parametrize("name", range(FLAKY))
def test_second(name):
    passes_at(2, name)

@pytest.mark.second_try
@pytest.mark.skipif(not BROKEN, reason="not wanted")
def test_third():
    passes_at(3, "third")

@pytest.mark.skipif(not BROKEN, reason="not wanted")
def test_unmarked():
    passes_at(2, "unmarked")
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> object:
    """Run tests of which so many pass at the second try; ``broken``: and some that fail."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makeini("[pytest]\nmarkers = second_try: real ones")

    def run(flaky: int, *options: str, broken: bool = False) -> pytest.RunResult:
        pytester.makepyfile(test_it=TESTS.replace("FLAKY", str(flaky)).replace("BROKEN", str(broken)))
        return pytester.runpytest_subprocess("-p", "second_try", "-p", "no:cacheprovider", *options)

    return run


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_what_passed_at_the_second_try_is_named_and_two_are_let_pass(run: object, options: tuple[str, ...]) -> None:
    assert callable(run)
    done = run(2, *options)
    assert done.ret == pytest.ExitCode.OK
    done.assert_outcomes(passed=2, skipped=2)
    assert sorted(line for line in done.outlines if line.startswith("FLAKY")) == [
        "FLAKY test_it.py::test_second[0]",
        "FLAKY test_it.py::test_second[1]",
    ]


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_three_fail_the_run(run: object, options: tuple[str, ...]) -> None:
    assert callable(run)
    done = run(3, *options)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.assert_outcomes(passed=3, skipped=2)
    done.stdout.fnmatch_lines("*3 passed at the second try only; that is too many: the run fails*")


def test_what_fails_twice_or_is_not_marked_fails_and_is_not_called_flaky(run: object) -> None:
    assert callable(run)
    done = run(0, broken=True)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.assert_outcomes(failed=2, skipped=1)
    done.stdout.no_fnmatch_line("FLAKY*")


def test_repeated_rounds_take_the_second_try_away(run: object) -> None:
    assert callable(run)
    done = run(1, "--force-reruns", "0")
    done.assert_outcomes(failed=1, skipped=2)
