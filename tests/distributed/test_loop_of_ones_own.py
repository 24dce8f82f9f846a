"""The parts for a loop of one's own, by the example that shows them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import springtide as st
from springtide.checkpoint.format import committed
from springtide.config import Config
from springtide.store import Folder

pytestmark = pytest.mark.distributed
EXAMPLE = Path(__file__).parents[2] / "examples" / "bare_loop.py"


def start(size: int, dataset: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += [str(EXAMPLE), dataset, str(folder), "--steps", "30"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def losses(process: subprocess.Popen[str], until: int = 0) -> dict[int, float]:
    """Step -> loss, as printed; at step ``until`` all processes are killed."""
    assert process.stdout is not None
    found = {}
    with process:
        for line in process.stdout:
            if match := re.fullmatch(r"step (\d+) loss (\S+)\n", line):
                found[int(match[1])] = float(match[2])
            if until in found:
                os.killpg(process.pid, signal.SIGKILL)
                break
    return found


def test_killed_and_started_with_other_ranks_it_has_the_losses_of_the_run_that_was_left_alone(
    tiny: Config, tmp_path: Path
) -> None:
    dataset = tiny.shards.dataset
    alone = losses(start(1, dataset, tmp_path / "alone"))
    assert list(alone) == list(range(1, 31))
    assert alone[30] < 0.9 * alone[1]
    before = losses(start(2, dataset, tmp_path / "killed"), until=17)
    after = losses(start(3, dataset, tmp_path / "killed"))
    first, *_, last = after
    assert (first, last) in {(1, 30), (11, 30)}  # the save of step 10 may have been under way
    for step, loss in {**before, **after}.items():
        assert loss == pytest.approx(alone[step], rel=1e-4), step


def saved_apart(world: Any, folder: str, fails: bool) -> list[str]:
    """Save twice; with ``fails``, rank 1 cannot write the second one."""
    torch.manual_seed(0)
    model, said = nn.Linear(8, 8), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    with st.checkpoint.Checkpointer(folder) as checkpoints:
        checkpoints.save(1, model, optimizer)
        if fails and world.rank == 1:
            checkpoints._saver._run = Folder("/proc/nowhere")
        checkpoints.save(2, model, optimizer)
        try:
            checkpoints.wait()
        except st.CheckpointError as error:
            said.append(str(error))
    return said


def test_a_save_that_fails_on_one_rank_is_told_on_all(tmp_path: Path, ranks: Callable[..., list[Any]]) -> None:
    folder = str(tmp_path / "run")
    assert ranks(2, saved_apart, folder, False) == [[], []]
    assert committed(Folder(folder)) == ["step-0000000001", "step-0000000002"]
    for (problem,) in ranks(2, saved_apart, str(tmp_path / "bad"), True):
        assert re.search(r"the save in .*bad failed: .*\(rank 1\)", problem)
    assert committed(Folder(str(tmp_path / "bad"))) == ["step-0000000001"]
