"""The control plane in simulated time (``tests/programs/simulation``): forty schedules of faults, each one integer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from simulation import outside
from simulation.clock import Clock

pytestmark = pytest.mark.processes
PROGRAMS = Path(__file__).parents[1] / "programs"


def simulate(*arguments: str, hash_seed: int = 0) -> subprocess.Popen[str]:
    """Play seeds in a process of its own, with a hash seed of its own."""
    path = os.pathsep.join([str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-m", "simulation", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.mark.parametrize("num_again", [12, pytest.param(40, marks=pytest.mark.full)])
def test_forty_seeds_end_with_every_step_once_and_one_history_each(num_again: int) -> None:
    """One history: as many are played twice, with another hash seed, as are ``num_again``."""
    running = [
        simulate("--seeds", "0", str(count), "--digests", hash_seed=number)
        for number, count in enumerate((40, num_again), 1)
    ]
    first, second = (one.communicate(timeout=550)[0].splitlines() for one in running)
    assert "40 seeds, 0 found something" in first[-1], first
    assert len(first) == 41
    assert first[:num_again] == second[:-1]


def test_a_planted_defect_is_found() -> None:
    said = simulate("--seeds", "0", "20", "--defect", "A3").communicate(timeout=550)[0]
    assert "A3: found by seed" in said


@pytest.mark.parametrize("seed", ["1", pytest.param("25", marks=pytest.mark.full)])
def test_no_schedule_calls_anything_real(seed: str) -> None:
    process = simulate(seed, "--watched")
    said = process.communicate(timeout=550)[0]
    assert process.returncode == 0, said[-4000:]


SPRINGTIDE = {
    "__name__": "springtide.made_here",
    "subprocess": subprocess,
    "threading": threading,
    "time": time,
    "os": os,
}


@pytest.mark.parametrize("reached", ["subprocess.run(['true'])", "os.listdir('/')"])
def test_what_reaches_a_real_thing_raises_and_is_said(reached: str) -> None:
    said: list[str] = []
    with outside.guarded(said.append), pytest.raises(outside.Leak):
        eval(reached, dict(SPRINGTIDE))
    assert "springtide.made_here" in said[0]
    eval(reached, dict(SPRINGTIDE))


def test_a_clock_that_was_bound_early_is_seen() -> None:
    said: list[str] = []
    early = dict(SPRINGTIDE, now=time.time)
    with outside.replaced(Clock(0), 0), outside.watched(said.append):
        assert eval("time.time()", early) == outside.BEGIN_S
        assert not said
        eval("now()", early)
    assert said == ["springtide.made_here.<module>:1 calls the real time"]


def test_threads_of_springtide_are_simulated() -> None:
    with outside.replaced(Clock(0), 0):
        made = eval("threading.Thread(target=print)", dict(SPRINGTIDE))
        assert type(made).__module__ == "simulation.clock"
        assert threading.Thread(target=print).daemon is False
