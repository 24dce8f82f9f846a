"""Three runs share three nodes by priority: the higher takes two workers from the lower and gives them back; a third waits.
Prints JSON; each run is compared with an undisturbed twin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from springtide import config as configs
from springtide.api.drill import Scenario, config_of
from springtide.api.prepare import prepare
from springtide.api.queue import queue
from springtide.api.train import train
from springtide.ray.cluster.local import LocalCluster
from springtide.ray.cluster.nodes import leftovers
from springtide.run.folder import Run, open_run
from springtide.tracking.journal import read_journal

STEPS, FEWER = 400, 60
"""Steps of the lower, and of the higher, which ends first: then the lower has its workers again."""
_WAIT_S = 180.0
"""How long each event may take [s]."""


def config(root: str, name: str) -> configs.Config:
    """The config of a run."""
    plan = {
        "low-twin": {"elastic.max_workers": 1},
        "high-twin": {"elastic.max_workers": 1},
        "low": {"run.queue": "research"},
        "high": {"run.queue": "production", "run.priority": 10, "elastic.min_workers": 2, "elastic.max_workers": 2},
        "third": {"run.queue": "research", "run.priority": -1, "elastic.min_workers": 3},
    }
    steps = FEWER if name.startswith("high") else STEPS
    drilled = config_of(Scenario(3, (), steps, ""), root)
    return drilled.override({"run.id": name, **plan[name]})


def main() -> None:
    """Start the cluster and the runs; look at the queue while they train."""
    if sys.argv[1:]:
        train(config(*sys.argv[1:]))
        return
    root = tempfile.mkdtemp()
    prepare(config(root, "low-twin"))
    with LocalCluster(3, patience=10):
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        found: dict[str, Any] = {"log": (log := [])}
        begin_s = time.monotonic()

        def start(name: str) -> subprocess.Popen[bytes]:
            with Path(root, f"{name}.log").open("wb") as out:
                return subprocess.Popen(
                    [sys.executable, __file__, root, name], env=environment, stdout=out, stderr=subprocess.STDOUT
                )

        def until(what: str, holds: Callable[[], bool]) -> float:
            until_s = time.monotonic() + _WAIT_S
            while not holds():
                for name, child in children.items():
                    assert child.poll() in (None, 0), Path(root, f"{name}.log").read_text()[-3000:]
                assert time.monotonic() < until_s, f"{what} did not come: {queue().describe()}"
                time.sleep(0.1)  # between looks
            log.append(f"{time.monotonic() - begin_s:.2f} s: {what}")
            return time.monotonic()

        def rows() -> dict[str, Any]:
            return {one.run: one for one in queue().rows}

        for name in ("low-twin", "high-twin"):
            assert start(name).wait(_WAIT_S) == 0, Path(root, f"{name}.log").read_text()[-3000:]
        children = {"low": start("low")}
        until("the lower trains on three", lambda: steps(root, "low") > 20)
        children["third"] = start("third")
        until("the third waits", lambda: "third" in rows() and bool(rows()["third"].others))
        children["high"] = start("high")
        asked_s = until("the higher asks", lambda: "high" in rows())
        gave_s = until("the lower holds one", lambda: rows()["low"].holds == 1)
        until("the higher trains", lambda: steps(root, "high") > 0)
        found["waits_for"], found["table"] = rows()["third"].others, queue().describe()
        until("the third says so", lambda: any("'high'" in one for one in said(root, "third")))
        found["said"] = said(root, "third")
        children["third"].send_signal(signal.SIGTERM)
        until("the higher is done", lambda: children["high"].poll() == 0)
        until("the lower has three again", lambda: rows()["low"].holds == 3)
        until("all are done", lambda: all(child.poll() == 0 for child in children.values()))
        found["handover_s"] = gave_s - asked_s
        found["left"] = leftovers()
    for name in ("low", "high"):
        found[name] = compared(open_run(f"{root}/{name}"), open_run(f"{root}/{name}-twin"))
    print(json.dumps(found, allow_nan=False))


def steps(root: str, name: str) -> int:
    """How many steps the run has trained, as its journal says."""
    folder = Path(root, name)
    return len(open_run(str(folder)).steps) if (folder / "journal").exists() or (folder / "config.yaml").exists() else 0


def said(root: str, name: str) -> list[str]:
    """The reasons of the run's decisions."""
    if not Path(root, name).exists():
        return []
    return [one.describe() for one in read_journal(open_run(f"{root}/{name}").folder) if one.kind == "decided"]


def compared(run: Run, twin: Run) -> dict[str, Any]:
    """What the run and its twin have in common."""
    mine, theirs = ({one.step: (one.digest, one.loss) for one in each.steps} for each in (run, twin))
    return {
        "same": mine == theirs,
        "lost": [one.steps_lost for one in run.ledger.restarts],
        "gaps_s": [round(one.gap_s, 2) for one in run.ledger.restarts],
        "causes": [one.cause for one in run.ledger.restarts],
        "workers": sorted({one.world_size for one in run.steps}),
        "verified": run.verify().ok,
        "finished": run.finished,
    }


if __name__ == "__main__":
    main()
