"""A node whose device computes wrong results is left out of a run on Ray, which goes on from before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.full
def test_a_node_that_computes_wrong_results_is_left_out() -> None:
    path = os.pathsep.join(filter(None, [str(PROGRAMS), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, str(PROGRAMS / "wrong_node.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"]
    assert found["named"] == [True]
    assert found["causes"] == ["unfit node"]
    assert found["left_out"] == [False, True]
    assert found["world_sizes"][0] == 3
    assert found["started_at"][0] == 0
    assert 5 <= found["started_at"][1] <= found["agreed_step"][0]
