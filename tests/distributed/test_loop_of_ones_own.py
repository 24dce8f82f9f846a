"""The parts for a loop of one's own, by the example that shows them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import each
from torch import nn

import springtide as st
from springtide.checkpoint.format import committed
from springtide.config import Config
from springtide.storage import Folder

pytestmark = pytest.mark.distributed
LOOPS = (Path(__file__).parents[2] / "examples").glob("*.py")
EXAMPLES = sorted(one for one in LOOPS if one.stem != "part")  # a part is of our own loop


def losses(example: Path, size: int, dataset: str, folder: Path, steps: int) -> dict[int, float]:
    """Step -> loss, as ``example`` prints them on ``size`` ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += [str(example), dataset, str(folder), "--steps", str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)}


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, marks=[pytest.mark.full] * (one.stem != "bare_loop"), id=one.stem) for one in EXAMPLES],
)
@pytest.mark.full
def test_resumed_with_other_ranks_it_has_the_same_losses(example: Path, tiny: Config, tmp_path: Path) -> None:
    before = losses(example, 1, tiny.shards.dataset, tmp_path, steps=17)
    after = losses(example, 3, tiny.shards.dataset, tmp_path, steps=24)  # 10 rows a step: 4, 3 and 3
    assert list(before) == list(range(1, 18))
    assert list(after) == list(range(11, 25))  # it is saved every 10 steps
    assert after[24] < 0.9 * before[1]
    for step in range(11, 18):
        assert after[step] == pytest.approx(before[step], rel=1e-4), step


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


def test_a_loop_that_does_not_restore_is_told_instead_of_saving_what_would_not_count(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    with st.checkpoint.Checkpointer(folder) as checkpoints:
        for step in (10, 20, 20):
            checkpoints.save(step, model, optimizer)
    is_told = pytest.raises(st.CheckpointError, match=r"holds step 20, and 15 is no later one.*call restore first")
    with is_told, st.checkpoint.Checkpointer(folder) as checkpoints:
        checkpoints.save(15, model, optimizer)
    with st.checkpoint.Checkpointer(folder) as checkpoints:
        assert checkpoints.restore(model, optimizer) == 20
        checkpoints.save(20, model, optimizer)  # of a loop that saves what it has just restored
        checkpoints.save(30, model, optimizer)
        with pytest.raises(st.CheckpointError, match="holds step 30, and 25 is no later one"):
            checkpoints.save(25, model, optimizer)
    assert committed(Folder(folder)) == [f"step-00000000{step}" for step in (10, 20, 30)]


def test_a_save_that_fails_on_one_rank_is_told_on_all(tmp_path: Path, ranks: Callable[..., list[Any]]) -> None:
    folder = str(tmp_path / "run")
    for good, (problem,) in ranks(
        2, each, [(saved_apart, (folder, False)), (saved_apart, (str(tmp_path / "bad"), True))]
    ):
        assert good == []
        assert re.search(r"the save in .*bad failed: .*\(rank 1\)", problem)
    assert committed(Folder(folder)) == ["step-0000000001", "step-0000000002"]
    assert committed(Folder(str(tmp_path / "bad"))) == ["step-0000000001"]
