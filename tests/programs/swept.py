"""A sweep on raylets of its own. Some are killed under it while others join, and half way its driver is killed and it is
resumed; then each trial is trained once more, alone and without Ray. Prints one line of JSON; exits with 1 unless all is as it
should be.

python swept.py TRIALS LOSSES STEPS
python swept.py drive ROOT TRIALS STEPS [resume]    the driver
python swept.py members ROOT                        that of a population, two workers each
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ports import reserve

import springtide as st
from springtide import config as configs
from springtide.api.sweep import sweep
from springtide.errors import RunExists
from springtide.ray.cluster.local import LocalCluster
from springtide.ray.cluster.nodes import leftovers
from springtide.ray.train.snapshot_client import ALONE_S

MOST_NODES = 4
STEPS = 30
"""Of a trial, where nobody says otherwise."""


def table(trials: int, steps: int = STEPS) -> dict[str, Any]:
    step = configs.recipes.tiny().tokens_per_step
    return {
        "SPACE": {"optim.peak_lr": ("log_uniform", 1e-3, 3e-2), "optim.weight_decay": ("log_uniform", 1e-3, 0.3)},
        "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
        "BUDGET": {"trials": trials, "tokens_per_trial": steps * step, "rungs": 3},
    }


def config_of(root: str, steps: int = STEPS) -> configs.Config:
    changes = {
        "run.root": f"{root}/runs",
        "shards.root": f"{root}/datasets",
        "track.mlflow_uri": "off",
        "parallel.threads": 1,
        "parallel.reduction": "fp64",
        "train.sample_tokens": 0,
        "train.eval_tokens": 16 * 64,
        "elastic.min_workers": 1,
        "elastic.max_workers": 2,
        "elastic.notices": "off",
        "checkpoint.every_steps": steps // 3,
    }
    return st.prepare(configs.recipes.tiny().override(changes))


def population(root: str, least: int, most: int) -> tuple[configs.Config, dict[str, Any], dict[str, Any]]:
    """Config, space and options of a sweep whose four members train three at once where there is room, with so many workers
    each."""
    elastic = {"elastic.min_workers": least, "elastic.max_workers": most}
    base = config_of(root).override({"checkpoint.every_steps": 0, "track.mlflow_uri": "", **elastic})
    space = {**table(4), "SPACE": {"optim.peak_lr": ("log_uniform", 1e-6, 2e-2)}}
    return base, space, {"name": "members", "scheduler": "pbt", "concurrent": 3}


def trained(folder: Path) -> int:
    """Steps that trials have made, by their journals."""
    return sum(file.read_text().count('"kind": "step"') for file in folder.glob("trials/*/journal/*.jsonl"))


def drive(root: str, trials: int, steps: int, resume: bool) -> None:
    """The sweep, on the cluster that RAY_ADDRESS names."""

    def say(text: str) -> None:
        print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True)

    verdict = sweep(
        config_of(root, steps), table(trials, steps), name="swept", scheduler="none", resume=resume, say=say
    )
    print(json.dumps(verdict.as_dict()))


def driver(*arguments: str) -> subprocess.Popen[str]:
    """A process of its own, to be killed."""
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def finished(folder: Path) -> dict[str, int]:
    """Trials that are trained to their end, and how often they were begun."""
    runs = [st.open_run(str(one.parent)) for one in folder.glob("trials/*/config.yaml")]
    return {run.id: len(list(Path(run.folder.path).glob("leases/*.json"))) for run in runs if run.finished}


def alone(trial: Path, root: str) -> st.Run:
    """The run that a trial would have been in a process of its own, without Ray."""
    config = configs.load_config(trial / "config.yaml").override({"run.root": f"{root}/alone"})
    file = trial / "alone.yaml"
    file.write_text(configs.dump(config))
    [port] = reserve(1)
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = os.environ | group
    command = [sys.executable, "-m", "springtide.training", "--config", str(file)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return st.open_run(f"{root}/alone/{trial.name}")


def differences(folder: Path, root: str) -> list[str]:
    """Trials that are not the run they would have been alone."""
    found, trials = [], sorted(folder.glob("trials/trial-*"))
    with ThreadPoolExecutor(2) as pool:
        twins = list(pool.map(lambda trial: alone(trial, root), trials))
    for trial, twin in zip(trials, twins, strict=True):
        run = st.open_run(str(trial))
        if [(one.step, one.digest, one.loss) for one in run.steps] != [
            (one.step, one.digest, one.loss) for one in twin.steps
        ] or not run.verify().ok:
            found.append(trial.name)
    return found


def second_driver(base: configs.Config, space: dict[str, Any], folder: Path, first: int) -> str:
    """Try to drive the sweep from this process, too. Returns what is not as it should be: that it was not refused, that it was
    not told of process ``first``, or what it has written."""

    def own() -> dict[str, bytes]:
        files = [
            path
            for path in folder.rglob("*")
            if path.is_file() and path.parts[len(folder.parts)] not in ("trials", "ray")
        ]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    before, told = own(), "nothing"
    try:
        sweep(base, space, name="swept", scheduler="none", resume=True)
    except RunExists as error:
        told = str(error)
    after = own()
    written = [name for name in after if after[name] != before.get(name, b"") and not name.startswith("points/")]
    refused = "is held by lease 1, begun" in told and f"by process {first} on " in told
    return "" if refused and not written else f"it was told {told!r} and wrote {written}"


def main(trials: int, losses: int, steps: int) -> None:
    """Sweep, lose nodes, kill the driver, resume, compare."""
    shared_memory = {path.name for path in Path("/dev/shm").iterdir()}
    found: dict[str, Any] = {"lost": 0, "begun_again": []}
    with tempfile.TemporaryDirectory() as root, LocalCluster(min(MOST_NODES, trials + 1), patience=20) as cluster:
        base = config_of(root, steps)
        folder, total = Path(root) / "runs" / "swept", trials * steps
        process, killed = driver("drive", root, str(trials), str(steps)), False
        while process.poll() is None:
            done = trained(folder)
            if "second" not in found and done:
                found["second"] = second_driver(base, table(trials, steps), folder, process.pid)
            if found["lost"] < losses and done > (found["lost"] + 1) * total // (losses + 1):
                print(f"node {cluster.nodes[0][:8]} is killed", file=sys.stderr, flush=True)
                cluster.kill(cluster.nodes[0])
                cluster.add(wait=False)
                found["lost"] += 1
            if not killed and done > total // 2:
                process.kill()
                process.wait()
                killed, killed_s, before = True, time.monotonic(), finished(folder)
                print(f"the driver is killed; {len(before)} trials are finished", file=sys.stderr, flush=True)
                process = driver("drive", root, str(trials), str(steps), "resume")
            time.sleep(0.3)  # between looks at the journals
        assert process.stdout is not None
        told = process.stdout.read()
        found["verdict"] = json.loads(told.splitlines()[-1]) if process.returncode == 0 else {}
        found["killed"] = killed
        found["begun_again"] = [name for name, times in before.items() if finished(folder)[name] != times]
        # a trial that was finished when its driver was killed is not begun again: its servers end by themselves
        deadline = max(time.monotonic(), killed_s + ALONE_S) + 30
        while (left := leftovers()) and time.monotonic() < deadline:
            time.sleep(0.5)  # actors end when Ray gets to it
        found["leftovers"] = left
        found["different"] = differences(folder, root)
    found["shared_memory"] = sorted({path.name for path in Path("/dev/shm").iterdir()} - shared_memory)
    found["problems"] = problems(found, trials, losses)
    print(json.dumps(found))
    sys.exit(bool(found["problems"]))


def problems(found: dict[str, Any], trials: int, losses: int) -> list[str]:
    """What is not as it should be."""
    statuses = [one["status"] for one in found["verdict"].get("trials", [])]
    held = {
        "every trial finished": statuses == ["finished"] * trials,
        "nodes were lost": found["lost"] == losses,
        "a second driver was told who drives, and wrote nothing": found.get("second") == "",
        "the driver was killed": found["killed"],
        "nothing that was finished was begun again": not found["begun_again"],
        "every trial is the run it would have been alone": found["different"] == [],
        "nothing is left in the cluster": not found["leftovers"],
        "nothing is left in shared memory": not found["shared_memory"],
    }
    return [f"not so: {what}" for what, so in held.items() if not so]


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        drive(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), "resume" in sys.argv)
    elif sys.argv[1] == "members":
        base, space, options = population(sys.argv[2], 2, 2)
        sweep(base, space, **options)
    else:
        main(*map(int, sys.argv[1:]))
