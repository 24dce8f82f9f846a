"""The queue of a cluster, as its runs see it; and three real runs that share one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from springtide import config as configs
from springtide.api.queue import queue
from springtide.errors import ConfigError
from springtide.ray.cluster.session import NAMESPACE
from springtide.ray.cluster.worker_queue import ACTOR, QueueClient, check_quota, write_quotas


class Run:
    """A run as its driver is for the queue: it holds what it may."""

    def __init__(self, name: str, least: int, most: int, priority: int = 0, team: str = "x") -> None:
        self.config = configs.recipes.tiny().override(
            {
                "run.id": name,
                "run.queue": team,
                "run.priority": priority,
                "elastic.min_workers": least,
                "elastic.max_workers": most,
                "elastic.cpus_per_worker": 1,
            }
        )
        self.client, self.holds, self.others, self.most = QueueClient(), Counter[str](), "", most
        self.client.claim(self.config)
        self.may = 0

    def look(self) -> int:
        """Ask, and return how many workers it may have; it does not start or end any."""
        nodes, self.others = self.client.mine(60.0, self.holds, self.most)
        self.may = round(sum(each["CPU"] for each in nodes.values()))
        self.nodes = Counter({node: round(each["CPU"]) for node, each in nodes.items()})
        return self.may

    def obey(self) -> None:
        """Start or end workers."""
        self.holds = self.nodes


def settle(*runs: Run) -> None:
    """Let all give up and start what they should: a run gives up what it sees in one look, and says so in the next."""
    for _ in range(3):
        for run in runs:
            run.look()
            run.obey()


def until(run: Run, holds: Callable[[int], bool]) -> int:
    """Look until ``holds`` is true of the answer, and return it; while Ray restarts the queue there is none."""
    while True:
        with contextlib.suppress(ray.exceptions.RayError):
            if holds(may := run.look()):
                return may


def exists() -> bool:
    """Whether Ray knows the queue's actor."""
    try:
        ray.get_actor(ACTOR, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


@pytest.mark.cluster
def test_a_higher_priority_gets_what_a_lower_one_gives_up_and_not_before(ray_cluster: str) -> None:
    low, high = Run("low", 1, 4), Run("high", 2, 2, priority=5, team="y")
    try:
        assert low.look() == 4
        low.obey()
        assert high.look() == 0, "the lower one still has all"
        assert high.others == "'low' gives up 2 workers after its step"
        assert low.look() == 2
        assert low.others == "'high' (priority 5) gets 2 workers"
        assert high.look() == 0
        low.obey()
        low.look()
        assert high.look() == 2
        high.obey()
        rows = {one.run: (one.holds, one.share) for one in queue().rows}
        assert rows == {"high": (2, 2), "low": (2, 2)}
        high.most = 0  # it is paused
        high.look()
        high.obey()
        high.look()
        assert low.look() == 4
        high.most = 2
        assert high.look() == 0
    finally:
        high.client.release()
    try:
        assert low.look() == 4
        # Ray restarts the queue: until all have reported, each keeps what it has
        ray.kill(ray.get_actor(ACTOR, namespace=NAMESPACE), no_restart=False)
        assert until(low, lambda may: may != 4) == sum(low.holds.values()) == 2
        assert until(low, lambda may: may != 2) == 4, "now it knows that there are no others"
    finally:
        low.client.release()
    deadline = time.monotonic() + 120
    while exists():  # Ray ends an actor some time after `kill` returned
        assert time.monotonic() < deadline


@pytest.mark.cluster
def test_a_quota_is_kept_by_all_runs_of_a_queue_and_one_that_excludes_a_run_refuses_it(ray_cluster: str) -> None:
    write_quotas({})  # whatever tests before have set
    assert queue({"x": 3}).describe() == "no run is in the queue\nqueue x: at most 3 workers"
    one, two, other = Run("one", 1, 4), Run("two", 2, 4), Run("other", 1, 4, team="y")
    try:
        with pytest.raises(ConfigError, match=r"run.queue.*may have 3 workers, and this run needs 4"):
            check_quota(one.config.override({"elastic.min_workers": 4}))
        settle(one, two, other)
        assert [run.may for run in (one, two, other)] == [1, 2, 1]
        assert queue({"x": 1}).quotas == {"x": 1}
        settle(one, two, other)
        assert [run.may for run in (one, two, other)] == [1, 0, 3]
        assert two.others.endswith("queue 'x' may have 1 worker")
        with pytest.raises(ConfigError, match="is not a number of workers"):
            queue({"x": -1})
        assert queue({"x": None}).quotas == {}
    finally:
        for run in (one, two, other):
            run.client.release()


@pytest.mark.cluster
@pytest.mark.full  # `make long SUBJECT=sweeps`
def test_three_runs_share_three_nodes_and_lose_no_step() -> None:
    script = str(Path(__file__).parents[1] / "programs" / "shared_cluster.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for name in ("low", "high"):
        assert found[name]["same"]
        assert found[name]["verified"]
        assert not any(found[name]["lost"])
    assert found["low"]["workers"] == [1, 3]
    assert found["high"]["workers"] == [2]
    assert any("waiting for capacity" in one and "'high' (priority 10) has 2 workers" in one for one in found["said"])
    assert not found["left"]
