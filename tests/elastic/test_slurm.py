"""Jobs on a real Slurm of this machine: preempted, requeued, ended; and what the batch scripts say of jobs that cannot work.

Skipped where Slurm is not installed: `make slurm` runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from slurm_cluster import Slurm, slurm

import springtide as st
from springtide.checkpoint.format import committed
from springtide.config import Config
from springtide.config.files import dump
from springtide.run.folder import Run

REPOSITORY = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(slurm_cluster.why_not()), reason=slurm_cluster.why_not() or "Slurm is here"),
]
STEPS = 240


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm for this file's tests."""
    with slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def job(tiny: Config) -> Config:
    """A run of one worker per node, exact at any number of them."""
    changes = {"run.id": "mine", "train.total": STEPS * 12 * 64, "stream.max_epochs": 1e6, "parallel.reduction": "fp64"}
    return tiny.override({**changes, "elastic.min_workers": 2, "elastic.max_workers": 2, "train.eval_tokens": 0})


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a job: a home of its own, and this Python."""
    (tmp_path / "home").mkdir()
    path = str(REPOSITORY / "platform")
    return {
        "HOME": str(tmp_path / "home"),
        "SPRINGTIDE_PYTHON": sys.executable,
        "PYTHONPATH": path,
        "SPRINGTIDE_DASHBOARD": "false",
    }


def submit(running: Slurm, script: str, where: Path, home: dict[str, str], *arguments: str, slurms: str = "") -> str:
    """The id of a job with a batch script of ours, whose log is ``where``."""
    options = [f"--output={where}", *slurms.split(), f"deploy/slurm/{script}.sbatch", *arguments]
    return running.submit(*options, at=REPOSITORY, more=home)


def urgent(running: Slurm, nodes: int) -> str:
    """The id of a short job that takes nodes from others."""
    return running.submit("--partition=urgent", f"--nodes={nodes}", "--exclusive", "--output=/dev/null", "--wrap=true")


def twin(config: Config) -> Run:
    """The same training without Slurm, undisturbed."""
    return st.train(
        config.override({"run.id": "twin", "elastic.min_workers": 1, "elastic.max_workers": 1}), dashboard=False
    )


def same(run: Run, other: Run) -> None:
    """Check that two finished runs are the same training, and that the first is what it says."""
    assert run.finished
    assert run.verify().ok
    assert [(one.step, one.loss) for one in run.steps] == [(one.step, one.loss) for one in other.steps]


def test_a_preempted_job_is_requeued_and_goes_on_by_itself(
    running: Slurm, job: Config, home: dict[str, str], tmp_path: Path
) -> None:
    file, log = tmp_path / "mine.yaml", tmp_path / "job.log"
    file.write_text(dump(job))
    number = submit(running, "train", log, home, "--config", str(file))
    folder = Path(job.run.root, "mine")
    running.wait(lambda: (folder / "checkpoints").exists() and _committed(job), 500, "the first checkpoint")
    other = urgent(running, 1)
    running.wait(lambda: "back into the queue" in log.read_text(), slurm_cluster.GRACE_S, "the end of the save")
    running.wait(lambda: running.state(other) == "COMPLETED", 120, "the end of the other job")
    running.wait(lambda: running.state(number) in ("COMPLETED", "FAILED"), 500, "the end of the requeued job")
    assert running.state(number) == "COMPLETED", log.read_text()
    assert "Restarts=1" in running("scontrol", "show", "job", number)
    run = st.open_run(str(folder))
    assert len(run.starts) == 2
    same(run, twin(job))


def _committed(config: Config) -> bool:
    from springtide.store import Folder

    return bool(committed(Folder(config.run.root) / config.run.id))
