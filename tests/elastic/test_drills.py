"""Drills: real nodes are lost, announced to go and added while a run trains, and nothing shows in the training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import springtide as st

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def drill(*options: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "springtide.cli.main", "drill", "--json", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"], done.stderr[-5000:]
    assert found["digests_match"]
    assert found["loss_max_abs_diff"] == 0.0  # the sums are exact
    return found


def shared_memory() -> set[str]:
    """What lies there, but for the semaphores of other programs' process pools."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


def test_a_notice_costs_no_step_a_kill_one_and_growth_none(tmp_path: Path) -> None:
    """`make long SUBJECT=drills` has the others."""
    before = shared_memory()
    # as where Ray has never run; and what lies there may be of another cluster, which drivers find by it
    found = drill("--scenario", "all", RAY_TMPDIR=str(tmp_path))
    assert not list(tmp_path.iterdir())
    notice, kill, growth = [(one["cause"].split()[0].rstrip(":"), one["steps_lost"]) for one in found["restarts"]]
    assert notice == ("notice", 0)
    assert growth == ("grow", 0)
    assert kill[0] == "lost"
    assert kill[1] <= 2  # one, and the one whose copy was on its way
    sizes = [(one["workers_before"], one["workers_after"]) for one in found["restarts"]]
    assert sizes == [(3, 2), (2, 1), (1, 2)]
    assert found["leftovers"] == {}
    assert shared_memory() <= before


@pytest.mark.full
def test_a_drill_in_a_notebook_shows_that_nothing_changed(tmp_path: Path) -> None:
    notebook = nbformat.read(Path(__file__).parents[2] / "notebooks" / "elasticity.ipynb", as_version=4)
    NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}}).execute()
    run = st.open_run(str(tmp_path / "drills" / "drilled"))
    assert run.verify().world_sizes == (2, 3)
    assert [one.steps_lost for one in run.ledger.restarts] == [0]
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "the same samples at every step; losses differ by 0.0e+00" in said
