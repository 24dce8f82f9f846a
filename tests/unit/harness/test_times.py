"""Seconds of tests are added up by folder, and the slowest are listed."""

from __future__ import annotations

from pathlib import Path

import pytest
import times
from times import folder_of

pytest_plugins = "pytester"
PLUGIN = "import times\ndef pytest_configure(config): config.pluginmanager.register(times.Times(), 'times')"
TESTS = """
import subprocess, sys, time

def test_busy():
    end = time.process_time() + 0.3
    while time.process_time() < end: pass

def test_waits():
    time.sleep(0.5)

def test_child():
    busy = "import time\\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-S", "-c", busy], check=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_wall_and_cpu_seconds_are_printed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(times.__file__).parent))
    pytester.makeconftest(PLUGIN)
    folder = pytester.mkdir("unit") / "store"
    folder.mkdir()
    (folder / "test_it.py").write_text(TESTS)
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)
    done.assert_outcomes(passed=3)
    rows = {line.split()[-1]: line.split()[:-1] for line in done.outlines if line.count("unit/store")}
    wall, cpu, tests = rows["unit/store"]
    assert tests == "3"
    assert float(wall) >= 1.2
    assert 0.7 <= float(cpu) <= float(wall)
    wall, cpu = rows["unit/store/test_it.py::test_waits"]
    assert float(wall) >= 0.5
    assert float(cpu) < 0.3
    assert float(rows["unit/store/test_it.py::test_child"][1]) >= 0.4


def test_a_test_counts_for_its_package() -> None:
    assert folder_of("tests/unit/storage/test_cache.py::test_x[a/b]") == "tests/unit/storage"
    assert folder_of("tests/elastic/test_drills.py::test_x") == "tests/elastic"
    assert folder_of("test_x.py::test_x") == "."
