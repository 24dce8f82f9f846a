"""A sweep on raylets of its own, some of which are killed under it while others join. Prints one line of JSON.

python swept.py TRIALS LOSSES                  on nodes of its own; exits with 1 unless all is as it should be
python swept.py drive ROOT TRIALS [resume]     on the cluster that RAY_ADDRESS names, to be killed by whoever started it
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import springtide as st
from springtide import config as configs
from springtide.on_ray.local import LocalCluster
from springtide.on_ray.nodes import leftovers
from springtide.sweeps import sweep

NODES = 4
STEPS = 60


def table(trials: int) -> dict[str, Any]:
    step = configs.recipes.tiny().tokens_per_step
    return {
        "SPACE": {"optim.peak_lr": ("log_uniform", 1e-3, 3e-2), "optim.weight_decay": ("log_uniform", 1e-3, 0.3)},
        "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
        "BUDGET": {"trials": trials, "tokens_per_trial": STEPS * step, "rungs": 3},
    }


def config_of(root: str) -> configs.Config:
    changes = {
        "run.root": f"{root}/runs",
        "shards.root": f"{root}/datasets",
        "track.mlflow_uri": "off",
        "parallel.threads": 1,
        "parallel.reduction": "fp64",
        "train.sample_tokens": 0,
        "train.eval_rows": 16,
        "elastic.min_workers": 1,
        "elastic.max_workers": 2,
        "elastic.notices": "off",
        "checkpoint.every_steps": 20,
    }
    return st.prepare(configs.override(configs.recipes.tiny(), changes))


def trained(folder: Path) -> int:
    """Steps that trials have made, by their journals."""
    return sum(file.read_text().count('"kind": "step"') for file in folder.glob("trials/*/journal/*.jsonl"))


def drive(root: str, trials: int, resume: bool) -> None:
    """The same sweep, without losses."""
    verdict = sweep(
        config_of(root), table(trials), name="swept", scheduler="none", resume=resume, say=lambda text: None
    )
    print(json.dumps(verdict.as_dict()))


def main(trials: int, losses: int) -> None:
    """Sweep, lose nodes, compare the winner with itself alone."""
    shared_memory = {path.name for path in Path("/dev/shm").iterdir()}
    with tempfile.TemporaryDirectory() as root, LocalCluster(NODES, patience=20) as cluster:
        config, folder = config_of(root), Path(root) / "runs" / "swept"
        found: dict[str, Any] = {"said": []}

        def say(text: str) -> None:
            found["said"].append(text)
            print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True)

        def run() -> None:
            try:
                verdict = sweep(config, table(trials), name="swept", scheduler="none", say=say)
                found["verdict"] = verdict.as_dict()
            except BaseException as error:
                found["error"] = f"{type(error).__name__}: {error}"

        thread = threading.Thread(target=run)
        thread.start()
        lost, every = 0, trials * STEPS // (losses + 1)
        while thread.is_alive():
            if lost < losses and trained(folder) > (lost + 1) * every:
                say(f"node {cluster.nodes[0][:8]} is killed")
                cluster.kill(cluster.nodes[0])
                cluster.add(wait=False)
                lost += 1
            thread.join(0.5)  # between looks at the journals
        found["lost"] = lost
        deadline = time.monotonic() + 30
        while (left := leftovers()) and time.monotonic() < deadline:
            time.sleep(0.5)  # actors end when Ray gets to it
        found["leftovers"] = left
        if best := found.get("verdict", {}).get("best"):
            winner = st.attach(str(folder / "trials" / best))
            best_config = configs.load(folder / "best.yaml")
            alone = st.train(configs.override(best_config, {"run.id": "alone", "run.root": f"{root}/runs"}))
            found["verified"] = winner.verify()["ok"] and alone.verify()["ok"]
            found["same_losses"] = [one.loss for one in winner.steps] == [one.loss for one in alone.steps]
            found["steps"] = len(winner.steps)
    found["shared_memory"] = sorted({path.name for path in Path("/dev/shm").iterdir()} - shared_memory)
    found["problems"] = problems(found, trials, losses)
    print(json.dumps(found))
    sys.exit(bool(found["problems"]))


def problems(found: dict[str, Any], trials: int, losses: int) -> list[str]:
    """What is not as it should be."""
    statuses = [one["status"] for one in found.get("verdict", {}).get("trials", [])]
    held = {
        "every trial finished": statuses == ["finished"] * trials,
        "nodes were lost": found["lost"] == losses,
        "nothing is left in the cluster": not found["leftovers"],
        "nothing is left in shared memory": not found["shared_memory"],
        "verified": found.get("verified"),
        "the winner is the run it would have been alone": found.get("same_losses") and found["steps"] == STEPS,
    }
    return [f"not so: {what}" for what, so in held.items() if not so] + [found[one] for one in ("error",) if one in found]


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        drive(sys.argv[2], int(sys.argv[3]), "resume" in sys.argv)
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
