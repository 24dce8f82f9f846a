"""The control plane in simulated time (``tests/programs/simulation``): forty schedules of faults, each one integer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# a second try: on busy cores one run in twenty still plays a schedule otherwise
pytestmark = [pytest.mark.processes, pytest.mark.second_try]
PROGRAMS = Path(__file__).parents[1] / "programs"


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run seeds in a process of its own, which sets the hash seed: the order of sets is a part of a schedule."""
    path = os.pathsep.join([str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "simulation", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=550, check=False, env={**os.environ, "PYTHONPATH": path}
    )


def test_whatever_goes_wrong_a_run_comes_to_its_end_with_every_step_once() -> None:
    done = simulate("--seeds", "0", "40")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "40 seeds, 0 found something" in done.stdout


def test_a_defect_that_is_planted_back_is_found() -> None:
    done = simulate("--seeds", "0", "20", "--defect", "A3")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "A3: found by seed" in done.stdout
