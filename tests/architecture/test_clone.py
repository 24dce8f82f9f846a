"""A clone: what runs in it leaves nothing that git shows, and no file names a folder of one machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
REPOSITORY = Path(__file__).parents[2]


def tracked() -> list[Path]:
    """Files of the repository, those git would take included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for name in names if (path := REPOSITORY / name).is_file()]


def test_no_path_of_one_machine_is_written_down() -> None:
    pattern = re.compile(r"(?<![\w.])/(work|root|home/\w+)/")
    guilty = [
        path for path in tracked() if path.suffix not in {".svg"} and pattern.search(path.read_text(errors="ignore"))
    ]
    assert [path.name for path in guilty if path != Path(__file__)] == []


def test_the_readme_names_the_two_commands() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    run = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert [line.split("#")[0].strip() for line in run if line.startswith("make")] == ["make demo", "make test"]


def test_what_the_demo_and_the_tests_leave_in_a_clone_is_ignored_and_changes_no_rule(tmp_path: Path) -> None:
    left = ["runs/run/config.yaml", "datasets/it/manifest.json", "mlruns/0/meta.yaml", ".long/it/round-01/result.json"]
    ignored = subprocess.run(
        ["git", "check-ignore", *left], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert ignored.stdout.splitlines() == left
    # a folder of the name of a package in the root is no reason to sort its import as ours
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    for folder in ("platform", "tests"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", str(tmp_path)]
    done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
