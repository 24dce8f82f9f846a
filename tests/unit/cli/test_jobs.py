"""jobs/: each file is the command of its name, what Ray uploads is small, and exit statuses are those of the table."""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import springtide
from springtide.api.doctor import UploadCheck
from springtide.cli.commands import Status
from springtide.cli.job import check_sent, job
from springtide.cli.main import main, parser
from springtide.errors import (
    CheckpointError,
    CommandFailed,
    ConfigError,
    CorpusError,
    CorruptShard,
    DamagedFile,
    RunExists,
    StoreLost,
    StoreUnavailable,
    TrainingFailed,
    TrainingInterrupted,
)
from springtide.ray.cluster.upload import upload_of

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).parents[3]
COMMANDS = {
    "train": ["train"],
    "sweep": ["sweep"],
    "prepare": ["data", "prepare"],
    "evaluate": ["model", "evaluate"],
    "export": ["model", "export"],
}
MOST_BYTES = 10**6
"""Largest upload. Ray does not compress it."""


def test_there_is_a_job_for_each_command_and_no_other() -> None:
    assert {path.stem for path in (REPOSITORY / "jobs").glob("*.py")} == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_job_hands_its_arguments_to_its_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = REPOSITORY / "jobs" / f"{name}.py"
    text = file.read_text()
    assert f"sys.exit(job({', '.join(f'{chr(34)}{word}{chr(34)}' for word in COMMANDS[name])}))" in text
    # the command of its docstring is one that springtide has
    example = re.sub(r"\\\n", " ", text.split('"""')[1].replace("\\\\", "\\"))
    words = re.search(rf"python jobs/{name}\.py (.*)", example).group(1).split()
    monkeypatch.setattr(sys, "argv", [str(file), *words])
    heard: list[list[str]] = []
    monkeypatch.setattr("springtide.cli.job.main", lambda given: heard.append(given) or 0)
    assert job(*COMMANDS[name]) == 0
    assert heard == [[*COMMANDS[name], *words]]
    assert sys.argv[:2] == ["springtide", COMMANDS[name][0]]
    options, unknown = parser(show_all=True).parse_known_args(heard[0])
    assert unknown == []
    assert options.command


def test_a_folder_of_another_version_is_refused_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_sent(REPOSITORY)
    check_sent(tmp_path)  # says nothing
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "of another"\nversion = "7"\n')
    check_sent(tmp_path)
    (tmp_path / "pyproject.toml").write_text("project = 1")
    check_sent(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "springtide"\nversion = "9.0.1"\n')
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "jobs" / "train.py"), "--recipe", "tiny"])
    assert job("train") == 2
    said = capsys.readouterr().err
    assert "9.0.1" in said
    assert springtide.__version__ in said


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git has of this checkout, and what a user's work leaves in it: an environment, runs, data."""
    folder = tmp_path_factory.mktemp("clone")
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in names:
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((REPOSITORY / name).read_bytes())
    for name in (
        ".git/objects/ab",
        ".venv/lib/torch.so",
        ".venv-peers/x",
        "runs/a/data",
        "datasets/b/data",
        "dist/w.whl",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(2 * MOST_BYTES))
    (folder / "own_model.py").write_text("dim = 1\n")
    return folder


@pytest.mark.parametrize("gitignore", [True, False], ids=["as it is", "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"])
def test_what_ray_uploads_of_a_checkout_is_small(clone: Path, gitignore: bool, tmp_path: Path) -> None:
    """By Ray's own packaging, with Ray's own default excludes, as ``ray job submit --working-dir .`` calls it."""
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import create_package

    package, quiet = tmp_path / "package.zip", logging.getLogger("of this test")
    quiet.setLevel(logging.CRITICAL)
    create_package(str(clone), package, gitignore, excludes=get_runtime_env_default_excludes(), logger=quiet)
    assert package.stat().st_size < MOST_BYTES
    names = zipfile.ZipFile(package).namelist()
    kept = {f"jobs/{name}.py" for name in COMMANDS} | {"own_model.py", "tune_spaces/lr_and_decay.py", "pyproject.toml"}
    assert kept <= set(names)
    ours = upload_of(str(clone))
    if gitignore:
        assert ours.sizes.keys() == {name for name in names if not name.endswith("/")}
        assert ours.num_bytes < package.stat().st_size < 1.5 * ours.num_bytes
    tops = {name.split("/")[0] for name in names}
    assert not tops & {"platform", "tests", "docs", ".git", ".venv", ".venv-peers", "runs", "datasets", "dist"}


def test_what_an_upload_leaves_out_is_named(tmp_path: Path) -> None:
    """A job does not find the config that .gitignore names, nor the data. A link out of the folder may send much."""
    for name in ("mine.yaml", "my config.yaml", "data/a/text", "src/train.py", "src/x.yaml", "__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text("*.yaml\ndata/\n")
    (tmp_path / "src" / "inside").symlink_to("train.py")
    (tmp_path / "host").symlink_to("/etc/hostname")
    found = {one.name: one for one in UploadCheck(str(tmp_path)).make()}
    left_out = "by .gitignore, .rayignore or Ray's own list: data/ (1 file), mine.yaml, my config.yaml, src/x.yaml"
    assert (found["upload, left out"].status, found["upload, left out"].figure) == ("ok", left_out)
    assert (found["upload, links"].status, found["upload, links"].figure) == (
        "warn",
        "out of the folder: host -> /etc/hostname",
    )
    for number in range(20):
        (tmp_path / f"{number}.yaml").write_text("")
    assert upload_of(str(tmp_path)).left_out.keys() > {"0.yaml", "19.yaml"}
    assert "and 12 more" in {one.name: one for one in UploadCheck(str(tmp_path)).make()}["upload, left out"].figure


def test_a_huge_or_changed_folder_is_named_before_it_is_sent(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with (tmp_path / "data" / "text").open("wb") as file:
        file.truncate(20 * 2**20)  # no bytes on the disk
    (tmp_path / "train.py").write_text("x = 1\n")
    upload, commit = UploadCheck(str(tmp_path)).make()
    assert (upload.status, commit.status) == ("warn", "ok")
    assert "2 files, 20.00 MiB; largest: data 20.00" in upload.figure
    assert ".rayignore" in upload.remedy
    with (tmp_path / "data" / "text").open("ab") as file:
        file.truncate(600 * 2**20)
    assert UploadCheck(str(tmp_path)).make()[0].status == "fail"
    (tmp_path / ".rayignore").write_text("/data\n")
    for command in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *command], cwd=tmp_path, check=True)
    upload, left_out, commit = UploadCheck(str(tmp_path)).make()
    assert (upload.status, commit.status) == ("ok", "ok")
    assert left_out.figure.endswith(": data/ (1 file)")
    (tmp_path / "train.py").write_text("x = 2\n")
    commit = UploadCheck(str(tmp_path)).make()[-1]
    assert commit.status == "warn"
    assert "not committed" in commit.figure
    with pytest.raises(ConfigError, match=r"--upload = .*folder"):
        UploadCheck(str(tmp_path / "train.py"))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("a setting"), Status.BAD_INPUT),
        (CorpusError("empty"), Status.BAD_INPUT),
        (DamagedFile("a claim"), Status.BAD_INPUT),
        (TrainingFailed("rank 0"), Status.FAILED),
        (TrainingInterrupted("the mailbox has ended"), Status.FAILED),
        (CheckpointError("damaged"), Status.FAILED),
        (CorruptShard("damaged"), Status.FAILED),
        (RunExists("held"), Status.REFUSED),
        (CommandFailed("refused"), Status.REFUSED),
        (StoreLost("s3://bucket"), Status.UNREACHABLE),
        (StoreUnavailable("s3://bucket"), Status.UNREACHABLE),
        (ConnectionRefusedError(111, "connection refused"), Status.UNREACHABLE),
        (FileNotFoundError(2, "no such file"), Status.UNREACHABLE),
        (KeyboardInterrupt(), Status.INTERRUPTED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_ends_in_the_status_of_the_table(
    error: BaseException, status: Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise error

    one = argparse.ArgumentParser()
    one.set_defaults(command=fail)
    monkeypatch.setattr("springtide.cli.main.parser", lambda show_all: one)
    assert main([]) == status
    assert "Traceback" not in capsys.readouterr().err


def test_the_page_has_the_table() -> None:
    page = " ".join((REPOSITORY / "docs" / "how-to" / "jobs.md").read_text().split())
    for one in Status:
        assert f"| {one.value} | {one.__doc__} |" in page
