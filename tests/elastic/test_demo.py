"""The demo as a newcomer runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import springtide as st

# every day `make demo` runs the whole of it, and fails where it does not end well
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.full]


def test_the_demo_learns_loses_two_workers_and_says_what_that_cost(tmp_path: Path, datasets: Path) -> None:
    """All of ``make demo`` but the installation and two thirds of the steps."""
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
    kills = re.findall(r"step (\d+): kill -9 \d+, one of 2 workers", done.stdout)
    # a group of one may train until the killed worker's successor is ready: it grows at no cost
    again = re.findall(r"restart +step (\d+): \d+\.\d s without training, (\d) steps? trained again(.*)", done.stdout)
    assert all(lost == "0" for _, lost, size in again if "1 -> 2 workers" in size)
    costs = [(begin, lost) for begin, lost, size in again if "1 -> 2 workers" not in size]
    assert [int(step) >= at for step, at in zip(kills, (27, 53), strict=True)] == [True, True]
    assert [int(begin) + int(lost) >= int(step) for step, (begin, lost) in zip(kills, costs, strict=True)] == [
        True,
        True,
    ]
    assert "80 steps trained on exactly the samples of the uninterrupted run" in done.stdout
    assert f"report    {run.report}" in done.stdout
    [verify] = re.findall(
        r"try next\n  (.*springtide) verify .*\n  .*springtide report .*\n  .*springtide train ", done.stdout
    )
    assert Path(verify).exists() or verify == "springtide"
