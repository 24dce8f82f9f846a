"""A second node is lost while the group after the first loss forms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.cluster
@pytest.mark.slow
def test_a_second_loss_while_a_group_forms_costs_seconds() -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "programs" / "second_loss.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"]
    assert found["world_sizes"] == [3, 1]
    assert found["again_s"] < 60  # a worker that is left behind in the group's setup would hold its CPU for 180 s
    assert found["leftovers"] == {}
