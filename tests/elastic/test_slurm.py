"""Jobs on a real Slurm of this machine: preempted, requeued, ended; and what the batch scripts say of jobs that cannot work.

Skipped where Slurm is not installed: `make long SUBJECT=slurm` runs it.
"""

from __future__ import annotations

import os
import subprocess
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
from springtide.events import StepDone
from springtide.run.folder import Run

REPOSITORY = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
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
    lean = {
        "SPRINGTIDE_DASHBOARD": "false",
        "SPRINGTIDE_RAY_START": "--include-log-monitor false --object-store-memory 200000000",
    }
    path = [str(REPOSITORY / "platform"), os.environ.get("PYTHONPATH", "")]
    python = {"SPRINGTIDE_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(path)}
    return {"HOME": str(tmp_path / "home"), **python, **lean}


def submit(running: Slurm, script: str, where: Path, home: dict[str, str], *arguments: str, slurms: str = "") -> str:
    """The id of a job with a batch script of ours, whose log is ``where``."""
    options = [f"--output={where}", *slurms.split(), f"deploy/slurm/{script}.sbatch", *arguments]
    return running.submit(*options, at=REPOSITORY, more=home)


def urgent(running: Slurm, nodes: int) -> str:
    """The id of a short job that takes nodes from others."""
    return running.submit("--partition=urgent", f"--nodes={nodes}", "--exclusive", "--output=/dev/null", "--wrap=true")


def twin(config: Config) -> Run:
    """The same training in one process, without Slurm and Ray, undisturbed."""
    file = Path(config.run.root).with_name("twin.yaml")
    file.write_text(dump(config.override({"run.id": "twin", "elastic.min_workers": 1, "elastic.max_workers": 1})))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    subprocess.run([*launch, "-m", "springtide.training", "--config", str(file)], check=True)
    return st.open_run(str(Path(config.run.root, "twin")))


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
    running.wait(lambda: (folder / "checkpoints").exists() and _committed(job), 900, "the first checkpoint")
    other = urgent(running, 1)
    running.wait(lambda: "back into the queue" in log.read_text(), slurm_cluster.GRACE_S, "the end of the save")
    running.wait(lambda: running.state(other) == "COMPLETED", 120, "the end of the other job")
    running.wait(lambda: running.state(number) in ("COMPLETED", "FAILED"), 900, "the end of the requeued job")
    assert running.state(number) == "COMPLETED", log.read_text()
    assert "Restarts=1" in running("scontrol", "show", "job", number)
    run = st.open_run(str(folder))
    assert len(run.starts) == 2
    same(run, twin(job))


def _committed(config: Config) -> bool:
    from springtide.storage import Folder

    return bool(committed(Folder(config.run.root) / config.run.id))


def test_a_task_of_an_array_is_drained_and_joins_again(
    running: Slurm, job: Config, home: dict[str, str], tmp_path: Path
) -> None:
    """One worker per node, and the run needs both: it goes on when the node that was taken away has joined again."""
    file, log = tmp_path / "mine.yaml", tmp_path / "task-%a.log"
    file.write_text(dump(job.override({"elastic.cpus_per_worker": 2.0})))
    more = home | {"SPRINGTIDE_JOB": "train"}
    array = submit(running, "sweep", log, more, "--config", str(file), slurms="--array=0-1")
    running.wait(lambda: _committed(job), 900, "the first checkpoint")
    where = running("squeue", "--noheader", f"--jobs={array}_1", "--format=%N")
    other = running.submit(
        "--partition=urgent", f"--nodelist={where}", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    joiner = tmp_path / "task-1.log"
    running.wait(lambda: "this node is to leave in" in joiner.read_text(), 60, "the drain")
    running.wait(lambda: running.state(other) == "COMPLETED", 200, "the end of the other job")
    running.wait(lambda: (tmp_path / "task-0.log").read_text().count("report ") > 0, 600, "the end of the run")
    running.wait(lambda: running("squeue", "--noheader", f"--jobs={array}") == "", 60, "the end of the array")
    run = st.open_run(str(Path(job.run.root, "mine")))
    steps = [event.step for event in run.events if isinstance(event, StepDone)]
    assert len(steps) == len(set(steps)), "a step was trained again"
    assert len(run.starts) == 2
    same(run, twin(job))


def test_a_preempted_job_without_ray_goes_on_by_itself(
    running: Slurm, job: Config, home: dict[str, str], tmp_path: Path
) -> None:
    file, log = tmp_path / "mine.yaml", tmp_path / "job.log"
    file.write_text(dump(job))
    number = submit(running, "torchrun", log, home, "--config", str(file))
    running.wait(lambda: _committed(job), 900, "the first checkpoint")
    other = urgent(running, 1)
    running.wait(lambda: "back into the queue" in log.read_text(), slurm_cluster.GRACE_S, "the end of the save")
    running.wait(lambda: running.state(other) == "COMPLETED", 120, "the end of the other job")
    running.wait(lambda: running.state(number) in ("COMPLETED", "FAILED"), 900, "the end of the requeued job")
    assert running.state(number) == "COMPLETED", log.read_text()
    run = st.open_run(str(Path(job.run.root, "mine")))
    assert len(run.starts) == 2
    same(run, twin(job))


def test_a_job_that_cannot_work_says_why(running: Slurm, job: Config, home: dict[str, str], tmp_path: Path) -> None:
    file, log = tmp_path / "mine.yaml", tmp_path / "job.log"
    file.write_text(dump(job))
    with pytest.raises(AssertionError, match="invalid partition"):
        submit(running, "train", log, home, slurms="--partition=nowhere")
    many = ["--elastic.min-workers", "9", "--elastic.max-workers", "9"]
    number = submit(running, "train", log, home, "--config", str(file), *many)
    running.wait(lambda: running.state(number) in ("COMPLETED", "FAILED"), 900, "the end of the job")
    assert running.state(number) == "FAILED"
    said = log.read_text()
    assert "refused: elastic.min_workers = 9: 2 node(s) of this allocation have room for 4 worker(s)" in said
    assert not Path(job.run.root, "mine").exists()
