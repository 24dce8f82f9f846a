"""A notebook, a private cluster, a kill -9 of everything: in processes of their own."""

from __future__ import annotations

import glob
import json
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

import springtide as st
from springtide.cli.main import parser
from springtide.cli.options import config_of
from springtide.config import Config

pytestmark = pytest.mark.cluster
REPOSITORY = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "springtide.cli.main"]
STEPS = 90


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
    deadline = time.monotonic() + 120
    while not any(f'"step": {step},' in file.read_text() for file in run.glob("journal/*.jsonl")):
        assert driver.poll() is None, f"the driver ended with {driver.returncode}"
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.02)  # between looks at the journal


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
    workers = [process for process in family if "RayTrainWorker" in " ".join(process.cmdline())]
    assert len(workers) == 2  # looked for while there is time: they train on meanwhile
    wait_for_step(root / "killed", 60, driver)
    family = psutil.Process(driver.pid).children(recursive=True)
    for process in (driver, *workers):
        process.send_signal(signal.SIGKILL)
    driver.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, f"outlived their driver: {alive}"  # Ray's own processes end with the driver that started them

    refused = subprocess.run(
        [*CLI, "train", *options(tiny, "killed")], capture_output=True, text=True, timeout=60, check=False
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
from springtide.on_ray.cluster.session import cluster
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
