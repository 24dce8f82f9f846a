"""Sweeps on real clusters: whose nodes go, whose driver is killed, whose trials are no good."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from swept import config_of, table, trained

import springtide as st
from springtide import config as configs
from springtide.errors import ConfigError, RunExists
from springtide.sweeps import sweep

pytestmark = pytest.mark.cluster
SCRIPT = str(Path(__file__).parent / "swept.py")
TRIALS = 4


@pytest.fixture(scope="module")
def swept() -> dict[str, Any]:
    """What ``swept.py`` saw: four trials on four nodes, of which one was killed; `make sweeps` has sixteen and six."""
    command = [sys.executable, SCRIPT, str(TRIALS), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_trials_survive_lost_nodes_and_the_winner_is_the_run_it_would_have_been_alone(swept: dict[str, Any]) -> None:
    assert swept["problems"] == []
    restarts = [trial["restarts"] for trial in swept["verdict"]["trials"]]
    assert sum(restarts) >= 1


def rungs(verdict: dict[str, Any]) -> dict[str, Any]:
    return {trial["name"]: (trial["point"], trial["status"], trial["rungs"]) for trial in verdict["trials"]}


def test_a_sweep_whose_driver_is_killed_goes_on_to_the_same_results(
    swept: dict[str, Any], ray_cluster: str, tmp_path: Path
) -> None:
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, SCRIPT, "drive", str(tmp_path), str(TRIALS)]
    folder = tmp_path / "runs" / "swept"
    driver = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while trained(folder) < TRIALS * 60 // 2 or not finished(folder):
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)  # between looks at the journals
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    before = {name: attempts(folder, name) for name in finished(folder)}
    assert 0 < len(before) < TRIALS

    done = subprocess.run(
        [*command, "resume"], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert rungs(json.loads(done.stdout.splitlines()[-1])) == rungs(swept["verdict"])
    assert {name: attempts(folder, name) for name in before} == before  # what was finished is not begun again


def finished(folder: Path) -> list[str]:
    runs = [one.parent for one in folder.glob("trials/*/report.html")]
    return [run.name for run in runs if st.attach(str(run)).finished]


def attempts(folder: Path, name: str) -> int:
    return len(list((folder / "trials" / name / "attempts").glob("*.json")))


def test_what_is_no_good_is_stopped_what_fails_is_marked_and_the_best_is_a_config(
    ray_cluster: str, tmp_path: Path
) -> None:
    base = configs.override(config_of(str(tmp_path)), {"optim.max_left_out": 0, "track.mlflow_uri": ""})
    rates = (0.01, 1e-6, 1e-7, 1e30)
    space = {**table(TRIALS), "SPACE": {"optim.peak_lr": ("choice", *rates)}}
    said: list[str] = []
    verdict = sweep(base, space, name="asha", search="grid", concurrent=1, say=said.append)
    by_rate = {one.point["optim.peak_lr"]: one for one in verdict.outcomes}
    assert [by_rate[rate].status for rate in rates] == ["finished", "stopped", "stopped", "failed"]
    assert [len(by_rate[rate].rungs) for rate in rates[:3]] == [3, 1, 1]
    assert "left out, the last one" in by_rate[1e30].reason
    assert verdict.best is by_rate[0.01]
    assert any("FAILED" in text for text in said)
    best = configs.load(tmp_path / "runs" / "asha" / "best.yaml")
    assert (best.optim.peak_lr, best.run.root, best.run.id) == (0.01, str(tmp_path / "runs"), "")

    from mlflow import MlflowClient

    notes = json.loads((tmp_path / "runs" / "asha" / "mlflow.json").read_text())
    runs = MlflowClient(notes["tracking_uri"]).search_runs([notes["experiment_id"]])
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == notes["run_id"]]
    assert len(runs) == len(children) + 1 == TRIALS + 1
    [parent] = [run for run in runs if run.info.run_id == notes["run_id"]]
    assert parent.data.tags["springtide.best.trial"] == verdict.best.name

    with pytest.raises(RunExists, match="--resume"):
        sweep(base, space, name="asha", search="grid")
    with pytest.raises(ConfigError, match="chooses its points otherwise"):
        sweep(base, space, name="asha", search="random", resume=True)
    again = sweep(base, space, name="asha", search="grid", concurrent=1, resume=True, say=said.append)
    assert [(one.status, one.rungs) for one in again.outcomes] == [(one.status, one.rungs) for one in verdict.outcomes]


def test_a_sweep_ends_where_its_budget_does(ray_cluster: str, tmp_path: Path) -> None:
    base = config_of(str(tmp_path))
    space = table(TRIALS)
    space["BUDGET"]["tokens"] = 1.5 * space["BUDGET"]["tokens_per_trial"]
    said: list[str] = []
    verdict = sweep(base, space, name="short", scheduler="none", concurrent=1, say=said.append)
    assert any(text.startswith("the budget is spent, tokens") for text in said)
    assert len(verdict.outcomes) < TRIALS
    assert verdict.best is not None
    assert space["BUDGET"]["tokens"] <= verdict.tokens < 2.5 * space["BUDGET"]["tokens_per_trial"]
