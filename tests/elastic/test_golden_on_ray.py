"""What users made with commit 0ba2dd87 goes on, on Ray, by the same command with --resume."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import golden
import pytest
import yaml
from golden import FOLDER, PROJECT, RUNS, answer_json, datasets, losses, made

pytestmark = [pytest.mark.cluster, pytest.mark.full]
SPRINGTIDE = ("-m", "springtide.cli.main")
CLOSE = 1e-3
"""As in tests/unit/golden."""


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    """A fresh copy."""
    with golden.golden_folder() as found:
        yield found


def resume(*command: str, refused: bool = False) -> str:
    """Give a command again, as the user does, with --resume; return what it prints. ``refused``: whether it may be."""
    words = [sys.executable, *command, "--resume"]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode in ((0, 2) if refused else (0,)), done.stdout + done.stderr
    return done.stdout + done.stderr


def check_finished(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """It is the uninterrupted run, and verifies."""
    found, whole = answer_json(capsys, "verify", RUNS[name]), made()["losses"][name]
    assert found["ok"], found
    assert losses(RUNS[name]) == pytest.approx({int(step): loss for step, loss in whole.items()}, abs=CLOSE)


def test_run_and_its_page_of_mlflow_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The MLflow run is the same, and its metrics have the names that it began with."""
    from mlflow import MlflowClient

    client, note = MlflowClient(f"sqlite:///{FOLDER}/runs/mlflow.db"), RUNS["unfinished"] / "mlflow.json"
    run, known = json.loads(note.read_text())["run_id"], datasets()
    before = client.get_run(run).data.metrics.keys()
    assert "run unfinished: 120 steps" in resume(*SPRINGTIDE, *made()["commands"]["unfinished"])
    check_finished(capsys, "unfinished")
    assert datasets() == known
    assert json.loads(note.read_text())["run_id"] == run
    steps = {name: {one.step for one in client.get_metric_history(run, name)} for name in before}
    assert any(found == set(range(1, 121)) for found in steps.values())
    assert all(max(found) > made()["verify"]["unfinished"]["steps_checked"] for found in steps.values()), steps


def test_run_goes_on_although_its_corpus_has_grown(capsys: pytest.CaptureFixture[str]) -> None:
    with (FOLDER / "text" / "records.jsonl").open("a") as file:
        file.write(json.dumps({"body": "one line more"}) + "\n")
    assert "run unfinished: 120 steps" in resume(*SPRINGTIDE, *made()["commands"]["unfinished"])
    check_finished(capsys, "unfinished")


def test_adapter_goes_on_in_the_root_that_the_error_names(capsys: pytest.CaptureFixture[str]) -> None:
    known = datasets()
    command, root = [*SPRINGTIDE, *made()["commands"]["tuned"]], ("--run.root", str(FOLDER / "elsewhere" / "runs"))
    assert " ".join(root) in resume(*command, refused=True)
    assert "run tuned: 120 steps" in resume(*command, *root)
    assert datasets() == known
    check_finished(capsys, "tuned")


def test_copied_job_goes_on_and_the_listener_hears(capsys: pytest.CaptureFixture[str]) -> None:
    heard = RUNS["own"] / "heard.txt"
    before = heard.read_text()
    resume("jobs/train.py", *made()["commands"]["own"])
    check_finished(capsys, "own")
    assert heard.read_text().startswith(before)
    assert "StepDone 120" in heard.read_text()


def test_sweep_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    starts = sorted((RUNS["trial-0000"] / "leases").glob("*.json"))
    resume(*SPRINGTIDE, *made()["commands"]["sweep"])
    trials = json.loads((FOLDER / "runs" / "sweep" / "result.json").read_text())["trials"]
    assert [one["status"] for one in trials] == ["finished", "finished"]
    assert sorted((RUNS["trial-0000"] / "leases").glob("*.json")) == starts, "it was finished before"
    check_finished(capsys, "trial-0001")


def test_run_that_took_up_text_goes_on_or_names_the_mixture(capsys: pytest.CaptureFixture[str]) -> None:
    said = resume(*SPRINGTIDE, *made()["commands"]["followed"], refused=True)
    if "run followed: 120 steps" not in said:
        assert "stream.mixture" in said
        given = yaml.safe_load((RUNS["followed"] / "config.yaml").read_text())
        del given["stream"]["follow"]
        (PROJECT / "mixture.yaml").write_text(yaml.safe_dump(given))
        resume(*SPRINGTIDE, "train", "--config", "mixture.yaml")
    check_finished(capsys, "followed")
