"""The golden folder: runs, datasets and a sweep that users made with commit 0ba2dd87, unpacked where they were made."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import runpy
import shutil
import signal
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import reserve

from springtide.cli.main import main

ARCHIVE = Path(__file__).parents[1] / "golden" / "golden.tar.xz"
FOLDER = Path("/tmp/springtide-golden")
"""As in tests/golden/make.py: configs hold this path."""
PROJECT = FOLDER / "project"
"""Working folder of the user."""
RUNS = {
    "finished": FOLDER / "runs/finished",
    "unfinished": FOLDER / "runs/unfinished",
    "own": FOLDER / "runs/own",
    "trial-0000": FOLDER / "runs/sweep/trials/trial-0000",
    "trial-0001": FOLDER / "runs/sweep/trials/trial-0001",
    "followed": FOLDER / "following/runs/followed",
    "base": FOLDER / "elsewhere/runs/base",
    "tuned": FOLDER / "elsewhere/runs/tuned",
}


@contextlib.contextmanager
def golden_folder() -> Iterator[Path]:
    """Unpack a fresh copy, with the times of its files, for the block. Other processes that want one wait meanwhile."""
    with open(f"{FOLDER}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(FOLDER, ignore_errors=True)  # of a test that was killed
        try:
            with tarfile.open(ARCHIVE) as archive:
                archive.extractall(FOLDER, filter="data")
            yield FOLDER
        finally:
            shutil.rmtree(FOLDER)


def made() -> dict[str, Any]:
    """Return what make.py has recorded: the ``commands`` of the runs, the ``losses`` of the uninterrupted runs by step, and
    what ``verify``, ``report``, ``list``, ``evaluate`` and ``export`` found at that commit."""
    found: dict[str, Any] = json.loads((FOLDER / "made.json").read_text())
    return found


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 0) -> str:
    """Run a command of springtide in this process; return what it prints on stdout and stderr."""
    capsys.readouterr()
    found = main([str(word) for word in words])
    said = "".join(capsys.readouterr())
    assert found == status, said
    return said


def answer_json(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    """Return what a command of springtide prints with --json."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def train_alone(*words: str | Path) -> None:
    """Run ``python -m springtide.training`` with these arguments in this process, as a group of one."""
    [port] = reserve(1)
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with _program("springtide.training", words), pytest.MonkeyPatch.context() as patch:
        for name, value in group.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stderr", sys.__stderr__)  # stacks of a hang are written to a real file
        runpy.run_module("springtide.training", run_name="__main__")


def run_job(file: Path, *words: str | Path) -> int:
    """Run a file of a user's jobs/ with these arguments in this process; return its exit status."""
    with _program(str(file), words), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    return int(ended.value.code or 0)


@contextlib.contextmanager
def _program(name: str, words: tuple[str | Path, ...]) -> Iterator[None]:
    """Let this process be a program for the block: its arguments, its path, its handlers of signals."""
    argv, path, modules = sys.argv, list(sys.path), set(sys.modules)
    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}
    sys.argv = [name, *map(str, words)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
        for module in {one for one in sys.modules if one.startswith("golden_")} - modules:
            del sys.modules[module]  # its file is gone with the folder


def contents() -> dict[str, tuple[int, int]]:
    """Return size and last change of every file of the folder."""
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    return {str(path.relative_to(FOLDER)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def losses(run: Path) -> dict[int, float]:
    """Return step -> loss of a run."""
    import springtide as st

    return {one.step: one.loss for one in st.open_run(str(run)).steps}


def datasets() -> set[str]:
    """Return the folders of all datasets."""
    return {os.path.dirname(path) for path in map(str, FOLDER.rglob("manifest.json")) if "/checkpoints/" not in path}
