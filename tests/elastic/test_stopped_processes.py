"""A stopped process of a real cluster says nothing; one that holds Python's lock, or waits, answers."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from springtide.ray.cluster.liveness import GONE_S, Liveness, answers, silent_processes
from springtide.ray.cluster.nodes import unanswering


@ray.remote(num_cpus=0)
class Process:
    """An actor's."""

    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def hold_the_lock(self, until_there: str) -> None:
        """As a call into C that does not give it back."""
        while not os.path.exists(until_there):
            ctypes.PyDLL(None).usleep(1_000_000 - 1)

    def nothing(self) -> bool:
        return True


def within(seconds: float, comes: Callable[[], bool]) -> bool:
    """Whether it comes to that in time."""
    end_s = time.monotonic() + seconds
    while not (found := comes()) and time.monotonic() < end_s:
        time.sleep(0.05)  # between looks at another process
    return found


@pytest.mark.cluster
def test_busy_and_stopped_processes_differ(ray_cluster: str, tmp_path: Path) -> None:
    idle, busy, stopped = (Process.remote() for _ in range(3))  # type: ignore[attr-defined]
    [node, *_], pid = ray.get(idle.where.remote()), ray.get(stopped.where.remote())[1]
    ray.get(busy.nothing.remote())
    actors: dict[Any, str] = dict.fromkeys((idle, busy, stopped), node)
    end = tmp_path / "end"
    holding = busy.hold_the_lock.remote(str(end))
    assert silent_processes(actors) == set()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert within(5.0, lambda: silent_processes(actors) == {stopped})
        assert unanswering({node}, speaks=True) == set()  # its raylet is there
        begin_s = time.monotonic()
        asked = {stopped.nothing.remote(): (stopped, node), idle.nothing.remote(): (idle, node)}
        assert len(answers(asked, 60.0)) == 1
        assert GONE_S < time.monotonic() - begin_s < 20.0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert within(5.0, lambda: not silent_processes(actors))
    assert Liveness().gone(actors) == set()
    end.touch()
    ray.get(holding)
    for one in actors:
        ray.kill(one)


@pytest.mark.cluster
@pytest.mark.full  # `make long SUBJECT=drills` has all cases
def test_a_worker_that_is_stopped_for_good_in_any_phase_costs_less_than_forty_seconds() -> None:
    phases = (
        "rendezvous-before",
        "first-collective-before",
        "claim-before",
        "restore-before",
        "commit-before",
        "shutdown-before",
    )
    only = ",".join(f"{phase}-halt" for phase in phases)
    command = [sys.executable, "-m", "fault_points", "cross", "--only", only, "--json"]
    programs = Path(__file__).parents[1] / "programs"
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False, cwd=programs)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["ok"], found["leftovers"]) == (True, {})
    assert found["gap_s_max"] < 40, found["table"]
