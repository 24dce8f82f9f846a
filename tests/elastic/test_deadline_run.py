"""A run with a deadline orders a node from Ray's own autoscaler, trains on it, and gives it back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.slow
def test_an_ordered_node_is_used_and_given_back_and_costs_no_step() -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "programs" / "deadline_run.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["is_verified"], done.stderr[-5000:]
    assert found["digests_match"]
    assert found["loss_max_abs_diff"] == 0.0  # the sums are exact
    assert [sorted(group) for group in found["groups"]] == [["spot"], ["on-demand", "spot"], ["spot"]], done.stderr[
        -5000:
    ]
    (_, first, given), *_, (_, last, given_last) = found["orders"]
    assert (first, given) == (1, [])
    assert (last, len(given_last)) == (0, 1)
    assert [steps_lost for _, _, steps_lost in found["restarts"]] == [0, 0, 0], "resumed, grown, shrunk"
    assert found["nodes_by_step"][-1][1] == ["spot"], "Ray has ended the node while the run went on"
    assert min(found["market_dollars"].values()) > 0
    assert found["in_time"], found  # last: it takes a machine that is as busy with the twin as with the run
