"""A run whose disk is full for a while."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_full import FULL_FROM, FULL_TO

from springtide import config as configs
from springtide.config import Config

pytestmark = pytest.mark.distributed
PROGRAM = str(Path(__file__).parents[1] / "programs" / "disk_full.py")
STEPS = 15


def test_training_goes_on_while_the_disk_is_full_and_nothing_is_missing_afterwards(
    tiny: Config, tmp_path: Path, small_disk: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    changes = {
        "run.id": "full",
        "run.root": str(tmp_path / "disk" / "runs"),
        "train.total": 12 * 64 * STEPS,
        "optim.warmup": 0,
        "train.eval_tokens": 0,
        "train.sample_tokens": 0,
        "checkpoint.every_steps": 3,
        "checkpoint.stage": "/dev/shm",
        "checkpoint.tries": 1,
        "track.progress": True,
    }
    (tmp_path / "config.yaml").write_text(configs.dump(tiny.override(changes)))
    command = [sys.executable, PROGRAM, str(tmp_path / "disk"), str(tmp_path / "config.yaml"), str(tmp_path / "gate")]
    done = small_disk(tmp_path / "disk", command, size="16m")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["status"], found["finished"], found["left"]) == (0, True, []), "\n".join(found["said"])
    assert found["steps"] == list(range(1, STEPS + 1))  # each once: the journal is whole
    assert found["steps_meanwhile"] == list(range(FULL_FROM + 1, FULL_TO + 1))
    assert (found["verified"], found["missing"]) == (True, [])
    assert found["checkpoints"][-1] == f"step-{STEPS:010d}"
    disk = re.escape(str(tmp_path / "disk"))
    told = (
        rf"No space left on device: {disk}/\S+ needs [\d,]+ bytes, the disk at {disk} has [\d,]+ of [\d,]+ bytes free"
    )
    assert all(re.search(f"{told}; remove other files there", reason) for reason in found["failed"]), found["failed"]
    assert found["failed"]
    said = "\n".join(found["said"])
    assert len(re.findall(rf"the journal cannot be written to {disk}.*{told}", said)) == 1, said
    assert said.count("is whole again") == 1
