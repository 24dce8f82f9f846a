"""A run that trains is saved, resized, paused and stopped by commands from outside, and trains what it would have trained.
Meanwhile Ray's dashboard shows it as it is."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from loops import train
from ranks import run_ranks

import springtide as st
from springtide.config import Config
from springtide.errors import CommandFailed
from springtide.events import Commanded, Event, Started, StepDone
from springtide.run.control import CommandResult

pytestmark = pytest.mark.cluster
WAIT_S = 120.0


class Steered:
    """A run that somebody steers from a thread, as its events come."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._came = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._came:
            self.events.append(event)
            self._came.notify_all()

    def wait_for(self, what: Callable[[Event], bool], after: int = 0) -> int:
        """Wait for an event; returns the number of events until then."""
        with self._came:
            assert self._came.wait_for(lambda: any(map(what, self.events[after:])), WAIT_S)
            return len(self.events)

    def steps(self, number: int) -> None:
        """Wait until this many more steps are done."""
        with self._came:
            done = sum(isinstance(one, StepDone) for one in self.events)
            enough = lambda: sum(isinstance(one, StepDone) for one in self.events) >= done + number  # noqa: E731
            assert self._came.wait_for(enough, WAIT_S)


def workers_alive() -> int:
    """Worker processes that hold a CPU of the cluster."""
    free, whole = ray.available_resources().get("CPU", 0.0), ray.cluster_resources()["CPU"]
    return round(whole - free)


class Dashboard:
    """What Ray's dashboard tells of the run ``steered``."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _get(self, path: str) -> Any:
        asked = urllib.request.Request(
            f"{self._url}{path}", headers={"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.loads(answer.read())

    def _run(self) -> Any:
        """The newest run of that name: the test may be a second try."""
        found = [one for one in self._get("/api/train/v2/runs/v1")["train_runs"] if one["name"].startswith("steered-")]
        return max(found, key=lambda one: one["start_time_ns"])

    def train_run(self) -> tuple[str, str | None, list[list[int]]]:
        """The run's status and its detail, and the ranks of each worker group that lives or lived."""
        run = self._run()
        return (
            run["status"],
            run["status_detail"],
            [sorted(w["world_rank"] for w in one["workers"]) for one in run["attempts"]],
        )

    def logs(self) -> dict[int, str]:
        """Rank -> log file of the worker, of the newest group."""
        run = self._run()
        newest = max(run["attempts"], key=lambda one: one["start_time_ns"])
        return {worker["world_rank"]: worker["log_file_path"] for worker in newest["workers"]}

    def actors(self) -> Counter[str]:
        """Role -> number of live actors that bear the run's name."""
        found = self._get("/api/v0/actors?filter_keys=state&filter_predicates=%3D&filter_values=ALIVE")["data"][
            "result"
        ]
        return Counter(one["name"].split("/")[1] for one in found["result"] if one["name"].startswith("steered/"))


def test_a_run_is_saved_resized_paused_and_stopped_from_outside(tiny: Config, ray_cluster: str, tmp_path: Path) -> None:
    changes = {"train.total": "1B", "stream.max_epochs": 1e6, "optim.warmup": 0, "parallel.reduction": "fp64"}
    changes |= {"run.id": "steered", "stream.lanes": 6, "train.eval_tokens": 0, "checkpoint.every_steps": 10**6}
    config = tiny.override(changes | {"elastic.min_workers": 1, "elastic.max_workers": 2, "elastic.grow": "always"})
    steered, results = Steered(), dict[str, CommandResult]()
    board = Dashboard(ray_cluster)
    problems: list[BaseException] = []

    def steer() -> None:
        try:
            steered.wait_for(lambda one: isinstance(one, StepDone))
            run = st.open_run(f"{config.run.root}/steered")
            status, _, groups = board.train_run()
            assert (status, groups) == ("RUNNING", [[0, 1]])
            assert board.actors() == {"mailbox": 1, "worker": 2, "snapshots": 2}
            assert all(Path(log).exists() for log in board.logs().values())
            results["save"] = run.save(WAIT_S)
            with pytest.raises(CommandFailed, match=r"3 workers: elastic.min_workers is 1 and max_workers 2"):
                run.resize(3, WAIT_S)
            results["resize"] = run.resize(1, WAIT_S)
            steered.steps(2)
            assert board.train_run()[2][-1] == [0]
            assert board.logs().keys() == {0}
            results["lifted"] = run.resize(0, WAIT_S)
            steered.wait_for(
                lambda one: isinstance(one, Started) and one.world_size == 2, after=len(steered.events) - 1
            )
            steered.steps(2)
            results["pause"] = run.pause(WAIT_S)
            until_s = time.monotonic() + WAIT_S
            while workers_alive() and time.monotonic() < until_s:
                time.sleep(0.1)  # Ray counts what a killed process held a moment later
            assert not workers_alive()
            status, detail, _ = board.train_run()
            assert (status, str(detail).split(",")[0]) == ("SCHEDULING", "Scheduling 0 workers")
            assert board.actors()["worker"] == 0
            results["again"] = run.pause(WAIT_S)
            before = len(steered.events)
            results["continue"] = run.unpause(WAIT_S)
            steered.wait_for(lambda one: isinstance(one, StepDone), after=before)
            steered.steps(2)
            results["stop"] = run.stop(WAIT_S)
        except BaseException as error:
            problems.append(error)
            st.open_run(f"{config.run.root}/steered").stop(WAIT_S)

    thread = threading.Thread(target=steer)
    thread.start()
    run = st.train(config, listen=steered)
    thread.join()
    assert not problems, problems
    assert board.train_run()[0] == "FINISHED"
    assert not board.actors()
    assert run.status == "stopped"
    assert all(one.done for one in results.values())
    assert results["save"].text == f"step-{results['save'].step:010d} is committed"
    assert f"step-{results['save'].step:010d}" in run.checkpoints
    steps = [results[name].step for name in ("save", "resize", "lifted", "pause", "again", "continue", "stop")]
    assert steps == sorted(steps)
    sizes = [one.world_size for one in run.starts]
    assert sizes[:1] + sizes[-2:] == [2, 2, 2]
    assert 1 in sizes
    told = [one for one in run.events if isinstance(one, Commanded)]
    assert [one.verb for one in told] == [
        "save",
        "resize",
        "resize",
        "resize",
        "pause",
        "pause",
        "continue",
        "stop",
    ]
    assert [one.refused for one in told].count(True) == 1
    assert all("@" in one.caller for one in told)
    assert run.verify().ok
    found = {one.step: one.loss for one in run.steps}
    [whole] = run_ranks(1, train, run.config.override({"run.id": "whole"}), max(found))
    assert found == {one.step: one.loss for one in whole if isinstance(one, StepDone)}
    with pytest.raises(CommandFailed, match="its last driver has ended"):
        run.pause()
