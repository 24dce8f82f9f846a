"""Where a run came from, as MLflow shows it: never a secret, and the commit of a real checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from springtide.api.provenance import datasets_of, origin_of, tags_of
from springtide.api.resolve import ResolvedRun
from springtide.config import Config
from springtide.run.folder import Run
from springtide.run.origin import Origin
from springtide.storage import Folder

pytestmark = pytest.mark.processes


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
    found = origin_of(["/bin/springtide", "train"], str(checkout))
    commit, remote = git(checkout, "rev-parse", "HEAD"), "https://me:***@git.host/project.git"
    assert found == Origin("springtide train", commit, "work", remote, is_changed=False)
    (checkout / "model.py").write_text("one = 2\n")
    script = origin_of([str(checkout / "mine.py"), "--key", "hunter2"], str(tmp_path))
    assert script.is_changed, "a script is of its own checkout, wherever it is started"
    assert script.command == str(checkout / "mine.py")


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
    assert origin_of(command, str(tmp_path)) == Origin(shown)


def test_no_git_and_a_hostile_checkout_are_no_commit(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(checkout, "config", "core.fsmonitor", f"touch {tmp_path}/ran")
    assert origin_of(["springtide"], str(checkout)).commit
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert origin_of(["springtide"], str(checkout)) == Origin("springtide")


@pytest.mark.parametrize("name", ["x", "a=b", "a.b"])
def test_a_filter_of_the_checkout_is_not_run(name: str, checkout: Path, tmp_path: Path) -> None:
    """Git runs it on a file that looks changed, to tell whether it is."""
    (checkout / ".gitattributes").write_text(f"* filter={name}\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "two")
    for kind in ("clean", "process"):
        git(checkout, "config", f"filter.{name}.{kind}", f"touch {tmp_path}/ran; cat")
    git(checkout, "config", f"filter.{name}.required", "true")
    os.utime(checkout / "model.py", (0, 0))
    assert not origin_of(["springtide"], str(checkout)).is_changed
    (checkout / "model.py").write_text("one = 2\n")
    assert origin_of(["springtide"], str(checkout)).is_changed
    assert not (tmp_path / "ran").exists()


def test_a_commit_checked_out_by_its_id_has_no_branch(checkout: Path) -> None:
    git(checkout, "checkout", "-q", "--detach")
    found = origin_of(["springtide"], str(checkout))
    assert (found.branch, found.source) == ("", f"{found.commit[:12]} of {found.repository}")


def test_no_remote_of_the_checkout_is_called(checkout: Path, tmp_path: Path) -> None:
    """Git asks the remote of a partial clone for objects that are missing, by a program that the config may name."""
    git(checkout, "config", "remote.origin.url", str(tmp_path))
    git(checkout, "config", "remote.origin.promisor", "true")
    git(checkout, "config", "remote.origin.uploadpack", f"touch {tmp_path}/ran; false")
    git(checkout, "config", "protocol.file.allow", "always")
    git(checkout, "config", "core.repositoryformatversion", "1")
    git(checkout, "config", "extensions.partialClone", "origin")
    tree = git(checkout, "rev-parse", "HEAD^{tree}")
    (checkout / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    origin_of(["springtide"], str(checkout))
    assert not (tmp_path / "ran").exists()


def test_mlflow_gets_the_origin_under_its_own_names(tiny: Config, tmp_path: Path) -> None:
    found = ResolvedRun(Run(Folder(tmp_path / "run")), tiny, "", ())
    tags = tags_of(found, Origin("springtide train --run.id x", "c0ffee", "work", "https://git.host/p.git", True))
    assert {name: value for name, value in tags.items() if name.startswith("mlflow.")} == {
        "mlflow.source.name": "springtide train",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": "c0ffee",
        "mlflow.source.git.branch": "work",
        "mlflow.source.git.repoURL": "https://git.host/p.git",
        "mlflow.source.git.dirty": "true",
    }
    assert tags["springtide.command"] == "springtide train --run.id x"
    without = tags_of(found, Origin("mine.py --x 1"))
    assert without["mlflow.source.name"] == "mine.py --x 1"
    assert not any(name.startswith("mlflow.source.git") for name in without)


def test_a_run_names_its_datasets_with_their_sizes(tiny: Config, tmp_path: Path) -> None:
    found = ResolvedRun(Run(Folder(tmp_path / "run")), tiny, "", ())
    [dataset] = datasets_of(found)
    rows = found.data.corpora[0].whole.sources[found.data.corpora[0].source]["train"]
    assert (dataset.url, dataset.context) == (tiny.shards.dataset, "training")
    assert dataset.digest == next(iter(found.data.datasets.values()))
    assert (dataset.profile["tokens"], dataset.profile["rows"]) == (rows.tokens, rows.rows)
    assert tags_of(found, Origin())["springtide.dataset"] == tiny.shards.dataset
