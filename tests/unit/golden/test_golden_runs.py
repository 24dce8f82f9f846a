"""What users made with commit 0ba2dd87 opens, verifies, exports and goes on, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden
import pytest
import yaml
from golden import FOLDER, PROJECT, RUNS, answer, answer_json, contents, datasets, losses, made, run_job, train_alone

from springtide.errors import ConfigError

CLOSE = 1e-3
"""Most difference of a loss on another kind of CPU [nats]. Losses of two successive batches differ by 0.007 to 0.08."""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A fresh copy, and a user in the working folder who has trusted no code yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with golden.golden_folder() as found:
        monkeypatch.chdir(PROJECT)
        yield found


SWEEPS = ("sweep",)
"""Which `run list` shows since, beside the runs."""
ROOTS_OF_BASE = ("--run.root", f"{FOLDER}/elsewhere/runs", "--shards.root", f"{FOLDER}/elsewhere/datasets")
"""Versions up to commit 9c427aee took the roots of a model's run; now the user names them."""


def options_of(name: str) -> list[str]:
    """The command of a run, without ``train``."""
    words: list[str] = made()["commands"][name]
    roots = ROOTS_OF_BASE if name == "tuned" else ()
    return [*(words[1:] if words[0] == "train" else words), *roots]


def close(found: dict[int, float], name: str) -> bool:
    """Whether a run has the losses of the uninterrupted run, to its last step."""
    whole: dict[str, float] = made()["losses"][name]
    return found == pytest.approx({int(step): loss for step, loss in whole.items()}, abs=CLOSE)


def check_finished(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A run that went on is proven from its first step to its last, and learned what the uninterrupted run did."""
    found = answer_json(capsys, "verify", RUNS[name])
    assert found["ok"], found
    assert close(losses(RUNS[name]), name)
    [row] = [row for row in answer_json(capsys, "run", "list", RUNS[name].parent) if row["id"] == RUNS[name].name]
    assert (row["state"], row["step"]) == ("finished", row["num_steps"])


def test_verify_and_report_answer_as_then(capsys: pytest.CaptureFixture[str]) -> None:
    for name in RUNS:
        check_proof_and_book(name, capsys)


def check_proof_and_book(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`verify` and `report` of a run answer as they did then."""
    proof, then = answer_json(capsys, "verify", RUNS[name]), made()["verify"][name]
    assert proof["ok"], name
    same = ("steps_checked", "steps_trained_again", "world_sizes", "order_identity", "steps_proven_by_chain", "missing")
    assert {key: proof[key] for key in same} == {key: then[key] for key in same}, name
    book, then = answer_json(capsys, "report", RUNS[name]), made()["report"][name]
    for key in ("tokens", "held", "goodput"):
        assert book[key] == pytest.approx(then[key]), (name, key)
    restarts = [[(one["step"], one["steps_lost"]) for one in each["restarts"]] for each in (book, then)]
    assert restarts[0] == restarts[1], name
    assert f"run {RUNS[name].name}: " in answer(capsys, "report", RUNS[name])


def test_lists_answer_as_then(capsys: pytest.CaptureFixture[str]) -> None:
    for root, then in made()["list"].items():
        rows = [row for row in answer_json(capsys, "run", "list", FOLDER / root) if row["id"] not in SWEEPS]
        same = ("id", "step", "num_steps", "loss")
        assert [{key: row[key] for key in same} for row in rows] == [{key: row[key] for key in same} for row in then]
        ends = {row["id"]: row["state"] for row in then if row["state"] in ("finished", "stopped")}
        assert {row["id"]: row["state"] for row in rows if row["id"] in ends} == ends
        assert then[0]["id"] in answer(capsys, "run", "list", FOLDER / root)


@pytest.mark.processes
def test_looks_at_runs_datasets_and_two_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for run in RUNS.values():
        assert "committed, " in (said := answer(capsys, "inspect", run, "--verify"))
        assert all(line.endswith(", verified") for line in said.splitlines() if "committed, " in line), said
    for dataset in datasets():
        assert "digest" in answer(capsys, "inspect", dataset, "--verify")
    compared = answer_json(capsys, "run", "compare", RUNS["trial-0000"], RUNS["unfinished"])
    assert compared["first_other_loss"] is None, "the same settings, text and seed"
    assert compared["common_steps"] > 20


@pytest.mark.processes
def test_models_export_the_same_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in RUNS:
        if name != "own":
            check_weights(name, tmp_path / name, capsys)


def check_weights(name: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model of a run has the weights and the held-out loss that it had then."""
    from safetensors.numpy import load_file

    found = answer_json(capsys, "model", "export", RUNS[name], "--out", out)
    then = made()["export"][name]
    assert (found["checkpoint"].rpartition("/")[2], found["architecture"]) == (then["checkpoint"], then["architecture"])
    tensors = load_file(out / "model.safetensors")
    sums = {key: float(abs(tensor.astype("float64")).sum()) for key, tensor in tensors.items()}
    assert sums == pytest.approx(then["sums"], rel=1e-5), name
    assert {key: list(tensor.shape) for key, tensor in tensors.items()} == then["shapes"], name
    evaluated, then = answer_json(capsys, "model", "evaluate", RUNS[name]), made()["evaluate"][name]
    assert evaluated["heldout_loss"] == pytest.approx(then["heldout_loss"], abs=CLOSE), name


def test_finished_run_has_nothing_left(capsys: pytest.CaptureFixture[str]) -> None:
    before = contents()
    said = answer(capsys, "train", *options_of("finished"), "--resume")
    assert "run finished finished at step 240: nothing to do" in said
    config = ("--config", RUNS["finished"] / "config.yaml")  # docs/how-to/release.md resumes so after an upgrade
    assert "nothing to do" in answer(capsys, "train", *config, "--resume")
    assert contents() == before
    other = (*options_of("finished"), "--optim.peak-lr", "0.02")
    assert "optim.peak_lr: 0.01 -> 0.02" in answer(capsys, "train", *other, "--resume", status=3)
    assert contents() == before


@pytest.mark.processes
@pytest.mark.parametrize("name", ["unfinished", "tuned"])
def test_same_settings_go_on(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The same options find the same dataset and the same run, and it is trained as if it had not been interrupted. Chats are
    laid out otherwise since: they are prepared anew for a new run, and the old run goes on with its own dataset."""
    known, at = datasets(), max(losses(RUNS[name]))
    answer(capsys, "data", "prepare", *options_of(name), "--save", tmp_path / "same.yaml")
    made_anew = datasets() - known
    assert len(made_anew) == (name == "tuned")
    train_alone("--config", RUNS[name] / "config.yaml" if made_anew else tmp_path / "same.yaml")
    check_finished(capsys, name)
    assert answer_json(capsys, "report", RUNS[name])["restarts"], f"it went on after step {at}"
    said = answer(capsys, "train", *options_of(name), "--resume")
    assert "finished at step 120: nothing to do" in said


def test_adapter_names_the_root_of_its_base(capsys: pytest.CaptureFixture[str]) -> None:
    """The command as it was given then: nothing is written, and the error has the option to add."""
    before = contents()
    said = answer(capsys, "train", *made()["commands"]["tuned"][1:], "--resume", status=2)
    assert f"search where the model's run is: --run.root {FOLDER}/elsewhere/runs" in said
    assert contents() == before


@pytest.mark.processes
def test_own_code_goes_on_when_trusted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The driver was killed: its lease has no end, and steps after the last checkpoint are trained again."""
    config, before = RUNS["own"] / "config.yaml", contents()
    with pytest.raises(ConfigError, match="--trust-code"):
        train_alone("--config", config)
    assert contents() == before
    said = answer(capsys, "model", "evaluate", RUNS["own"], status=2)
    assert "golden_model.py" in said
    assert "--trust-code" in said
    answer(capsys, "model", "evaluate", RUNS["own"], "--trust-code")
    assert "no architecture" in answer(capsys, "model", "export", RUNS["own"], "--out", tmp_path / "export", status=2)
    train_alone("--config", config, "--trust-code")
    check_finished(capsys, "own")
    assert answer_json(capsys, "verify", RUNS["own"])["steps_trained_again"] > 0
    capsys.readouterr()
    assert run_job(PROJECT / "jobs" / "train.py", *options_of("own"), "--resume") == 0
    assert "finished at step 120: nothing to do" in "".join(capsys.readouterr())


@pytest.mark.processes
@pytest.mark.full
def test_trial_and_best_of_a_sweep_go_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sweep = FOLDER / "runs" / "sweep"
    assert "is a sweep" in answer(capsys, "inspect", sweep, status=2)
    best = json.loads((sweep / "result.json").read_text())["best"]
    train_alone("--config", RUNS["trial-0001"] / "config.yaml")
    check_finished(capsys, "trial-0001")
    longer = ("--run.id", "longer", "--train.total", str(100 * 12 * 32), "--save", tmp_path / "longer.yaml")
    known = datasets()
    answer(capsys, "data", "prepare", "--config", sweep / "best.yaml", *longer)
    assert datasets() == known
    train_alone("--config", tmp_path / "longer.yaml")
    found = losses(FOLDER / "runs" / "longer")
    assert len(found) == 100
    assert found[5] == pytest.approx(made()["losses"][best]["5"], abs=CLOSE), "the learning rate of the best trial"


@pytest.mark.processes
@pytest.mark.parametrize("follow", ["as it was", ""])
def test_run_that_took_up_text_goes_on(follow: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Settings that name the mixture go on. Those that follow an index go on, too, or are told of the mixture."""
    records = [json.loads(file.read_text()) for file in sorted((RUNS["followed"] / "followed").iterdir())]
    urls = [url for record in records for url in record["datasets"].values()]
    given: dict[str, Any] = yaml.safe_load((RUNS["followed"] / "config.yaml").read_text())
    assert list(given["stream"]["mixture"].values()) == urls
    given["shards"]["dataset"] = urls[0]  # the loop without Ray wants one, and reads the mixture
    if not follow:
        del given["stream"]["follow"]
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(given))
    said = ""
    try:
        train_alone("--config", tmp_path / "given.yaml")
    except ConfigError as error:
        said = str(error)
    if said and follow:
        assert "stream.mixture" in said  # the file has its datasets
    else:
        assert not said
        check_finished(capsys, "followed")
