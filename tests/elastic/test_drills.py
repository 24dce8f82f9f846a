"""Drills: real nodes are lost, announced to go and added while a run trains, and nothing shows in the training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def drill(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "springtide.cli", "drill", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"], done.stderr[-5000:]
    assert found["digests_match"]
    assert found["loss_max_abs_diff"] == 0.0  # the sums are exact
    return found


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_a_notice_costs_no_step_a_kill_one_and_growth_none() -> None:
    before = shared_memory()
    found = drill("--scenario", "all")
    causes = [(one["cause"].split(":")[0].split()[0], one["steps_lost"]) for one in found["restarts"]]
    notice, kill, *growth = causes
    assert notice == ("notice", 0)
    assert kill[0] == "lost"
    assert kill[1] <= 2  # one, and the one whose copy was on its way
    assert growth == [("grow", 0)]
    assert [(one["workers_before"], one["workers_after"]) for one in found["restarts"]] == [(3, 2), (2, 1), (1, 2)]
    assert shared_memory() <= before
