"""A run that trains is saved, resized, paused and stopped by commands from outside, and trains what it would have trained."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

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


def test_a_run_is_saved_resized_paused_and_stopped_from_outside(tiny: Config, ray_cluster: str, tmp_path: Path) -> None:
    changes = {"train.total": "1B", "stream.max_epochs": 1e6, "optim.warmup": 0, "parallel.reduction": "fp64"}
    changes |= {"run.id": "steered", "stream.lanes": 6, "train.eval_tokens": 0, "checkpoint.every_steps": 10**6}
    config = tiny.override(changes | {"elastic.min_workers": 1, "elastic.max_workers": 2, "elastic.grow": "always"})
    steered, results = Steered(), dict[str, CommandResult]()
    problems: list[BaseException] = []

    def steer() -> None:
        try:
            steered.wait_for(lambda one: isinstance(one, StepDone))
            run = st.open_run(f"{config.run.root}/steered")
            results["save"] = run.save(WAIT_S)
            results["note"] = run.note("halfway", WAIT_S)
            with pytest.raises(CommandFailed, match=r"3 workers: elastic.min_workers is 1 and max_workers 2"):
                run.resize(3, WAIT_S)
            results["resize"] = run.resize(1, WAIT_S)
            steered.steps(2)
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
    assert run.status == "stopped"
    assert all(one.done for one in results.values())
    assert results["save"].text == f"step-{results['save'].step:010d} is committed"
    assert f"step-{results['save'].step:010d}" in run.checkpoints
    steps = [results[name].step for name in ("save", "note", "resize", "lifted", "pause", "again", "continue", "stop")]
    assert steps == sorted(steps)
    sizes = [one.world_size for one in run.starts]
    assert sizes[:1] + sizes[-2:] == [2, 2, 2]
    assert 1 in sizes
    told = [one for one in run.events if isinstance(one, Commanded)]
    assert [one.verb for one in told] == [
        "save",
        "note",
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
