"""A second node is lost while a group forms: a fault at a fault point, which also shows that a run passes them
all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fault_points.watch import name_of

from springtide.faults import POINTS


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.full  # `make long SUBJECT=drills` has all cases
def test_a_second_loss_while_a_group_forms_costs_seconds() -> None:
    command = [sys.executable, "-m", "fault_points", "cross", "--only", "rendezvous-before-kill", "--json"]
    programs = Path(__file__).parents[1] / "programs"
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, cwd=programs)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["ok"], found["cases"], found["held"], found["leftovers"]) == (True, 1, 1, {})
    assert found["steps_lost_max"] == 0  # the group that was asked to leave kept its state, with copies
    assert found["gap_s_max"] < 60  # a worker that is left behind in the group's setup would hold its CPU for 180 s
    assert set(found["passed"]) == {name_of(point, when) for point in POINTS for when in ("before", "after")}
