"""Where a run came from, as MLflow shows it: never a secret, and the commit of a real checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from springtide.app.provenance import datasets_of, source_tags, tags_of
from springtide.app.resolve import ResolvedRun
from springtide.config import Config
from springtide.run.folder import Run
from springtide.store import Folder


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=me", "-c", "user.email=me@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "work")
    git(folder, "remote", "add", "origin", "https://me:hunter2@git.host/project.git")
    (folder / "model.py").write_text("one = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    return folder


def test_the_commit_of_the_checkout_is_shown_and_no_password(checkout: Path, tmp_path: Path) -> None:
    found = source_tags(["/bin/springtide", "train"], str(checkout))
    assert found == {
        "mlflow.source.name": "springtide train",
        "springtide.command": "springtide train",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git(checkout, "rev-parse", "HEAD"),
        "mlflow.source.git.branch": "work",
        "mlflow.source.git.repoURL": "https://me:***@git.host/project.git",
        "mlflow.source.git.dirty": "false",
    }
    (checkout / "model.py").write_text("one = 2\n")
    script = source_tags([str(checkout / "mine.py"), "--key", "hunter2"], str(tmp_path))
    assert script["mlflow.source.git.dirty"] == "true", "a script is of its own checkout, wherever it is started"
    assert script["mlflow.source.name"] == str(checkout / "mine.py")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["x/springtide/__main__.py", "train"], "springtide train"),
        (["ray/default_worker.py", "--session-token=hunter2"], "springtide"),
        (["x/other/__main__.py", "--key", "hunter2"], "x/other/__main__.py"),
        (
            ["springtide", "train", "--track.mlflow-uri", "http://a:hunter2@b"],
            "springtide train --track.mlflow-uri 'http://a:***@b'",
        ),
        ([""], "springtide"),
        ([], "springtide"),
    ],
)
def test_only_our_own_arguments_are_shown(tmp_path: Path, command: list[str], shown: str) -> None:
    found = source_tags(command, str(tmp_path))
    assert found["springtide.command"] == shown
    assert found["mlflow.source.name"] == " ".join(shown.split()[:2])
    assert found.keys() == {"springtide.command", "mlflow.source.name", "mlflow.source.type"}


def test_no_git_and_a_hostile_checkout_are_no_commit(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(checkout, "config", "core.fsmonitor", f"touch {tmp_path}/ran")
    assert "mlflow.source.git.commit" in source_tags(["springtide"], str(checkout))
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_tags(["springtide"], str(checkout)).keys() == {
        "springtide.command",
        "mlflow.source.name",
        "mlflow.source.type",
    }


def test_a_run_names_its_datasets_with_their_sizes(tiny: Config, tmp_path: Path) -> None:
    found = ResolvedRun(Run(Folder(tmp_path / "run")), tiny, "", ())
    [dataset] = datasets_of(found)
    rows = found.data.corpora[0].whole.sources[found.data.corpora[0].source]["train"]
    assert (dataset.url, dataset.context) == (tiny.shards.dataset, "training")
    assert dataset.digest == next(iter(found.data.datasets.values()))
    assert (dataset.profile["tokens"], dataset.profile["rows"]) == (rows.tokens, rows.rows)
    tags = tags_of(found, ["springtide", "train"], "/")
    assert tags["springtide.dataset"] == tiny.shards.dataset
    assert tags["mlflow.source.name"] == "springtide train"
