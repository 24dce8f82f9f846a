"""A notebook, a private cluster, a kill -9 of everything: in processes of their own."""

from __future__ import annotations

import glob
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import psutil
import pytest
import ray
from nbclient import NotebookClient
from ray.job_submission import JobSubmissionClient

import springtide as st
from springtide.checkpoint.format import committed
from springtide.cli.commands import Status
from springtide.cli.main import parser
from springtide.cli.options import config_of
from springtide.config import Config
from springtide.config.files import dump
from springtide.events import StepDone
from springtide.storage import Folder

pytestmark = pytest.mark.cluster
REPOSITORY = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "springtide.cli.main"]
STEPS = 90


@pytest.mark.full
def test_the_quickstart_runs_from_top_to_bottom(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "RAY_ADDRESS", ray.get_runtime_context().gcs_address
    )  # the others here start clusters of their own
    notebook = nbformat.read(REPOSITORY / "notebooks" / "quickstart.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    run = st.open_run(str(tmp_path / "runs" / "quickstart"))
    assert len(run.steps) == 60
    assert run.verify().world_sizes == (1, 2)


@pytest.mark.full
def test_a_model_comes_in_learns_to_answer_and_goes_out(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    notebook = nbformat.read(REPOSITORY / "notebooks" / "fine_tuning.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "execute_result"
    ]
    ours, theirs = said[-2:]
    assert ours == theirs
    assert ours.startswith("'the ")


@pytest.mark.full
def test_a_sweep_in_a_notebook_finds_a_point_and_trains_it_for_longer(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    notebook = nbformat.read(REPOSITORY / "notebooks" / "sweep.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    data = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]
    pages = [one["text/html"] for one in data if one.get("text/html")]  # that of Ray Tune is empty
    assert "3 trials" in pages[0]
    assert "<svg" in pages[1]
    assert st.open_run(str(tmp_path / "runs" / "longer")).finished


def submit(jobs: JobSubmissionClient, name: str, *options: str) -> None:
    """Submit jobs/train.py from the root of this repository, as `ray job submit` does, under the id ``name``."""
    deadline = time.monotonic() + 120
    while True:
        try:
            jobs.submit_job(
                entrypoint=shlex.join([sys.executable, "jobs/train.py", *options]),
                submission_id=name,
                runtime_env={"working_dir": str(REPOSITORY), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}},
            )
            return
        except RuntimeError as error:  # Ray's agent on a busy machine: what its error says to do
            if "please try again later" not in str(error) or time.monotonic() > deadline:
                raise


def ended(jobs: JobSubmissionClient, name: str) -> tuple[str, int | None, str]:
    """Wait for the end of a job; its status, the exit status of its command, and its log."""
    deadline = time.monotonic() + 240
    while not (info := jobs.get_job_info(name)).status.is_terminal():
        assert time.monotonic() < deadline, jobs.get_job_logs(name)
        time.sleep(0.1)  # between looks at the job
    return str(info.status), info.driver_exit_code, jobs.get_job_logs(name)


@pytest.mark.full
def test_ray_job_stop_saves_and_the_next_job_trains_no_step_again(tiny: Config, one_node: str) -> None:
    jobs, steps = JobSubmissionClient(one_node), 2 * STEPS
    exact = ["--parallel.threads", "1", "--parallel.reduction", "fp64", "--stream.max-epochs", "1000"]
    exact += ["--train.total", str(12 * 64 * steps)]
    given = [*options(tiny, "stopped"), *exact]
    folder = Path(tiny.run.root) / "stopped"
    submit(jobs, "stopped-1", *given, "--resume", "auto")
    deadline = time.monotonic() + 120
    while not any('"step": 20,' in file.read_text() for file in folder.glob("journal/*.jsonl")):
        assert time.monotonic() < deadline, jobs.get_job_logs("stopped-1")
        time.sleep(0.02)  # between looks at the journal
    assert jobs.stop_job("stopped-1")
    status, _, said = ended(jobs, "stopped-1")
    assert status == "STOPPED"
    assert "the same command with --resume continues from there" in said
    run = st.open_run(str(folder))
    assert run.status == "stopped"
    last = run.last_step
    assert max(committed(Folder(str(folder)))) == f"step-{last:010d}"
    assert 20 <= last < steps

    submit(jobs, "stopped-2", *given, "--resume", "auto")
    assert ended(jobs, "stopped-2")[:2] == ("SUCCEEDED", Status.DONE)
    trained = [event.step for event in run.events if isinstance(event, StepDone)]
    assert trained == list(range(1, steps + 1)), "a step is lost, or was trained again"
    assert [start.step for start in run.starts] == [0, last]
    assert run.verify().ok
    st.train(config_of(parser(show_all=True).parse_args(["train", *options(tiny, "twin"), *exact])))
    assert losses(run) == losses(st.open_run(f"{tiny.run.root}/twin"))

    submit(jobs, "stopped-3", *given)  # without --resume
    assert ended(jobs, "stopped-3")[:2] == ("FAILED", Status.REFUSED)


def losses(run: st.Run) -> list[tuple[int, float]]:
    """(step, loss), bit by bit."""
    return [(step.step, step.loss) for step in run.steps]


@pytest.mark.full
def test_all_ways_in_reach_the_same_losses(
    ray_cluster: str, one_node: str, tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python, command line, notebook, Ray job and torchrun: the same recipe, the same bits at each step."""
    jobs, steps = JobSubmissionClient(one_node), 20
    changes = {"train.total": steps * tiny.tokens_per_step, "train.sample_tokens": 0, "elastic.min_workers": 2}
    changes |= {"elastic.max_workers": 2, "parallel.reduction": "fp64", "parallel.threads": 1}
    config = tiny.override(changes)
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)

    def file(name: str) -> str:
        path = tmp_path / f"{name}.yaml"
        path.write_text(dump(config.override({"run.id": name})))
        return str(path)

    st.train(config.override({"run.id": "python"}))
    subprocess.run([*CLI, "train", "--config", file("shell")], check=True, timeout=240)
    shown = 'override({"track.progress": True})'
    cell = f'import springtide as st\nst.train(st.load_config("{file("notebook")}").{shown})'
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    NotebookClient(notebook, timeout=240).execute()
    assert f'<progress value="{steps}" max="{steps}">' in str(notebook.cells[0].outputs)
    submit(jobs, "ways", "--config", file("job"))
    assert ended(jobs, "ways")[0] == "SUCCEEDED"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launch, "-m", "springtide.training", "--config", file("torchrun")], check=True, timeout=240)

    expected = losses(st.open_run(f"{config.run.root}/python"))
    assert [step for step, _ in expected] == list(range(1, steps + 1))
    for name in ("shell", "notebook", "job", "torchrun"):
        run = st.open_run(f"{config.run.root}/{name}")
        assert losses(run) == expected, name
        assert run.verify().ok


@pytest.mark.full
def test_a_cluster_that_refuses_its_driver_is_said_in_a_sentence(ray_cluster: str) -> None:
    """With another token, and with none, on a real cluster."""
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    for more, said in (
        ({"RAY_AUTH_TOKEN": "0" * 64}, "what RAY_AUTH_TOKEN has is not the cluster's token"),
        ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE here is not token"),
    ):
        done = subprocess.run(
            [*CLI, "queue"], capture_output=True, text=True, timeout=120, check=False, env=os.environ | address | more
        )
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert "0" * 64 not in done.stderr


def options(config: Config, name: str) -> list[str]:
    settings = {
        "run.id": name,
        "run.root": config.run.root,
        "shards.dataset": config.shards.dataset,
        "track.mlflow-uri": "off",
        "elastic.min-workers": 2,
        "train.sample-tokens": 0,
        "train.total": 12 * 64 * STEPS,
    }
    return ["--recipe", "tiny", *(text for key, value in settings.items() for text in (f"--{key}", str(value)))]


def folders() -> set[str]:
    """Private clusters that exist now."""
    return set(glob.glob(f"{tempfile.gettempdir()}/springtide-ray-*"))


def wait_for_step(run: Path, step: int, driver: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while not any(f'"step": {step},' in file.read_text() for file in run.glob("journal/*.jsonl")):
        assert driver.poll() is None, f"the driver ended with {driver.returncode}"
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.02)  # between looks at the journal


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.full  # `make long SUBJECT=sweeps`
def test_killed_at_step_60_with_all_its_workers_it_resumes_as_if_nothing_had_been(
    ray_cluster: str, tiny: Config
) -> None:
    st.train(config_of(parser(show_all=True).parse_args(["train", *options(tiny, "whole")])))

    root = Path(tiny.run.root)
    before = folders()
    driver = subprocess.Popen(
        [*CLI, "train", *options(tiny, "killed")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_step(root / "killed", 1, driver)
    family = psutil.Process(driver.pid).children(recursive=True)
    workers = [process for process in family if "RayTrainWorker" in command_of(process)]
    assert len(workers) == 2  # looked for while there is time: they train on meanwhile
    wait_for_step(root / "killed", 60, driver)
    family = psutil.Process(driver.pid).children(recursive=True)
    for process in (driver, *workers):
        process.send_signal(signal.SIGKILL)
    driver.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, f"outlived their driver: {alive}"  # Ray's own processes end with the driver that started them

    refused = subprocess.run(
        [*CLI, "train", *options(tiny, "killed")], capture_output=True, text=True, timeout=240, check=False
    )
    assert refused.returncode == 3
    assert "resume it with --resume" in refused.stderr
    command = [*CLI, "train", *options(tiny, "killed"), "--resume"]
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert resumed.returncode == 0, resumed.stderr[-3000:]

    expected, found = (st.open_run(str(root / name)) for name in ("whole", "killed"))
    assert [step.step for step in found.steps] == list(range(1, STEPS + 1))
    for one, other in zip(found.steps, expected.steps, strict=True):
        assert one.digest == other.digest
        assert one.loss == pytest.approx(other.loss, abs=1e-4)
    proof = subprocess.run(
        [*CLI, "verify", str(root / "killed"), "--json"], capture_output=True, text=True, check=False
    )
    assert proof.returncode == 0
    result = json.loads(proof.stdout)
    assert result["ok"]
    assert result["steps_checked"] == STEPS
    assert result["loss_max_abs_diff"] < 1e-4  # of the steps between the last checkpoint and the kill, trained twice
    assert folders() <= before  # nothing of the killed run's cluster is left


PRIVATE = """
import subprocess, sys
from springtide import config
from springtide.ray.cluster.session import cluster
with cluster(config.recipes.tiny(), dashboard=False):
    import ray
    assert len(ray.nodes()) == 1
    print(ray.get_runtime_context().gcs_address)
    if len(sys.argv) > 1:
        print(subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True, check=True).stdout)
assert not ray.is_initialized()
"""


def test_a_private_cluster_joins_no_other_and_leaves_nothing() -> None:
    before = folders()
    done = subprocess.run(
        [sys.executable, "-c", PRIVATE, PRIVATE], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    addresses = done.stdout.split()
    assert len(addresses) == len(set(addresses)) == 2
    assert folders() <= before
