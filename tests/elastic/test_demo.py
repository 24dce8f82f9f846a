"""The demo as a newcomer runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import springtide as st

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_the_demo_learns_and_says_what_it_made(tmp_path: Path, datasets: Path) -> None:
    """All of ``make demo`` but the installation and six sevenths of the steps."""
    command = [sys.executable, "-m", "springtide.cli.main", "train", "--recipe", "demo", "--demo"]
    command += ["--run.root", str(tmp_path), "--shards.root", str(datasets), "--train.total", "81920"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [folder] = [path for path in tmp_path.iterdir() if (path / "config.yaml").exists()]
    run = st.open_run(str(folder))
    assert len(run.steps) == 80
    before, after = run.evaluations
    assert after.heldout_bits_per_byte < 0.8 * before.heldout_bits_per_byte
    assert (folder / "report.html").exists()
    assert (folder / "mlflow.json").exists()
    assert run.checkpoints
    assert len(run.sample) > 20
    assert re.search(r"try next\n  springtide verify .*\n  springtide run inspect .*\n  springtide train ", done.stdout)
