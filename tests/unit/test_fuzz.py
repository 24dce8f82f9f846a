"""The readers of files under a fuzzer (``tests/programs/fuzz``): some hundred changed files, each one integer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
PROGRAMS = Path(__file__).parents[1] / "programs"


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Play inputs in a process of its own: its children have limits of memory and time."""
    path = os.pathsep.join([str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "fuzz", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": path}
    )


def test_a_changed_file_is_taken_for_what_it_is_or_refused_by_name() -> None:
    done = fuzz("--seeds", "0", "150")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "150 inputs, 0 violations" in done.stdout
    targets = (
        "checkpoint",
        "lease",
        "note",
        "journal",
        "config",
        "dataset",
        "labels",
        "corpus",
        "tokens",
        "tokenizer",
        "sweep",
        "notice",
        "import",
    )
    assert [one for one in targets if f"  {one}: " not in done.stdout] == []


def test_a_defect_that_is_planted_back_is_found() -> None:
    done = fuzz("--seeds", "100", "110", "--defect", "holes")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "SILENT CORRUPTION: model/table keeps what was in memory" in done.stdout
