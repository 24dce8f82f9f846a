"""A run's processes: how long a start may take, which nodes are left out and for how long, and what is forgotten. Ray and the
clock are faked."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ray import FIT, FakeRay, faked
from ray.exceptions import RayError

from springtide import config as configs
from springtide.elastic.copies import LiveShard
from springtide.elastic.health import Health
from springtide.elastic.policy import Node
from springtide.ray._ray_private import WorkerGroupStartupFailedError
from springtide.ray.cluster import liveness
from springtide.ray.train.job import TrainJob
from springtide.ray.train.process_pool import StartCancelledError, UnfitNodesError, WorkerProcess, WorkerProcessPool


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return faked(monkeypatch)


def pool(network: dict[str, float] | None = None) -> WorkerProcessPool:
    """A pool. ``network``: node -> the speed that a second measurement finds."""
    mailbox: Any = SimpleNamespace(fetch_speed=lambda node: (network or {}).get(node, 0.0))
    processes = WorkerProcessPool()
    processes.prepare((), TrainJob(configs.recipes.tiny(), mailbox))
    return processes


def group(processes: WorkerProcessPool, ray: FakeRay, *nodes: str) -> list[WorkerProcess]:
    """Take processes for a group on ``nodes``."""
    assert processes._job is not None
    processes.prepare(nodes, processes._job)
    return processes.take(ray.start)


def test_a_hung_node_delays_others_four_usual_starts(ray: FakeRay) -> None:
    """A node that hangs holds the others up four times as long as they took."""
    processes, begin_s = pool(), ray.now_s
    ray.start_s |= {"a": 8.0, "b": 10.0, "hung": math.inf}
    # others came up, so it is that node's: it does not count as a failed start, of which a run has only some
    with pytest.raises(UnfitNodesError, match=r"in 40 s"):
        group(processes, ray, "a", "b", "hung")
    assert ray.now_s == begin_s + 40.0
    assert list(processes.problems()) == ["hung"]
    assert ray.alive == ["a", "b"]
    assert [process.node for process in group(processes, ray, "a", "b")] == ["a", "b"]
    assert ray.now_s == begin_s + 40.0  # in the processes that are there
    assert len(ray.started) == 3


def test_a_process_that_is_stopped_while_it_starts_holds_nobody_up(ray: FakeRay) -> None:
    """A start may take ten minutes here: none is known yet."""
    processes, begin_s = pool(), ray.now_s
    ray.start_s |= {"a": 120.0, "stopped": math.inf}
    ray.stopped_s["stopped"] = begin_s + 101.0
    with pytest.raises(UnfitNodesError, match="stopped"):
        group(processes, ray, "a", "stopped")
    assert ray.now_s <= begin_s + 122.0
    assert list(processes.problems()) == ["stopped"]
    assert ray.alive == ["a"]


def test_stopped_starts_are_reported_within_twenty_seconds(ray: FakeRay) -> None:
    """When all that start are stopped that is said within twenty seconds."""
    processes, begin_s = pool(), ray.now_s
    ray.start_s |= {"a": math.inf, "b": math.inf}
    ray.stopped_s |= {"a": begin_s + 50.0, "b": begin_s + 50.0}
    with pytest.raises(WorkerGroupStartupFailedError, match="not answer"):
        group(processes, ray, "a", "b")
    assert ray.now_s < begin_s + 70.0


def test_a_pause_shorter_than_that_changes_nothing(ray: FakeRay) -> None:
    processes, begin_s = pool(), ray.now_s
    ray.start_s |= {"a": 60.0, "paused": 60.0}
    ray.stopped_s["paused"] = begin_s + 20.0
    ask, paused = ray.silent_processes, list[float]()

    def silent_processes(actors: Any) -> set[Any]:
        paused.append(ray.now_s)
        return ask(actors) if ray.now_s < begin_s + 27.0 else set()

    ray.silent_processes = silent_processes  # type: ignore[method-assign]
    liveness.silent_processes = silent_processes  # type: ignore[assignment]  # as ``faked``, which is undone
    assert len(group(processes, ray, "a", "paused")) == 2
    assert paused


def test_enough_ready_processes_start_without_a_slow_one(ray: FakeRay) -> None:
    """Those that are ready and enough start without one that is slow and keep it."""
    processes, begin_s = pool(), ray.now_s
    ray.start_s |= {"a": 8.0, "cold": 100.0}
    processes.prepare(("a", "cold"), processes._job, lambda workers: workers >= 1)  # type: ignore[arg-type]
    with pytest.raises(UnfitNodesError, match="longer"):
        processes.take(ray.start)
    assert ray.now_s == begin_s + 28.0
    assert list(processes.problems()) == ["cold"]
    assert ray.alive == ["a", "cold"]  # it may take its time
    processes.prepare(("a",), processes._job, lambda workers: workers >= 1)  # type: ignore[arg-type]
    assert [process.node for process in processes.take(ray.start)] == ["a"]
    ray.now_s = begin_s + 100.0
    assert not processes.problems()
    assert processes.ready(["a"]) == {"a": 1, "cold": 1}
    assert len(ray.started) == 2


def test_one_process_per_node_measures_the_network(ray: FakeRay) -> None:
    """One process a node measures the network and its figure counts for all there.

    Each fetches megabytes from the driver's node, all at the same time."""
    processes = pool()
    ray.health |= {"a": FIT._replace(network_bytes_per_s=1e9)}
    taken = group(processes, ray, *["a"] * 8, *["b"] * 8)
    assert ray.measuring == ["a", "b"]
    ray.health.clear()  # what the others on it say: nothing
    processes.give_back(taken)
    group(processes, ray, *["a"] * 9, *["b"] * 8)
    assert ray.measuring == ["a", "b"]
    assert processes._health["a"].network_bytes_per_s == 1e9
    processes.observe([])  # the nodes are gone, and one comes back
    group(processes, ray, "a", "a")
    assert ray.measuring == ["a", "b", "a"]


def test_the_first_start_may_take_ten_minutes(ray: FakeRay) -> None:
    """Where nothing is known a start may take ten minutes and fast ones leave the next twenty seconds."""
    processes, begin_s = pool(), ray.now_s
    ray.start_s |= {"hung": math.inf, "a": 0.5, "cold": 19.0}
    with pytest.raises(WorkerGroupStartupFailedError) as failed:
        group(processes, ray, "hung")
    assert not isinstance(failed.value, UnfitNodesError)  # none came up: it may be the code
    assert ray.now_s == begin_s + 600.0
    assert len(group(processes, ray, "a", "cold")) == 2
    assert processes.problems().keys() == {"hung"}


def test_a_cold_start_is_waited_for_with_open_ears(ray: FakeRay) -> None:
    """Meanwhile capacity is asked for again, and the run may be stopped; what came up is kept."""
    processes, asked_s = pool(), list[float]()
    ray.start_s |= {"cold": 400.0, "colder": 500.0}

    def is_cancelled() -> bool:
        asked_s.append(ray.now_s)
        return ray.now_s - asked_s[0] > 450.0

    processes.is_cancelled = is_cancelled
    assert len(group(processes, ray, "cold")) == 1
    begin_s, at_s = 1000.0, [*asked_s, ray.now_s]
    assert ray.now_s == begin_s + 400.0
    assert max(after - before for before, after in itertools.pairwise(at_s)) < 5.0
    asked_s.clear()
    with pytest.raises(StartCancelledError):
        group(processes, ray, "colder", "a")
    assert not processes.problems()
    assert processes.ready([]) == {"a": 1}
    assert processes.held([]) == {"a": 1, "colder": 1}


def test_a_process_that_nobody_waits_for_may_take_its_time(ray: FakeRay) -> None:
    processes = pool()
    group(processes, ray, "a")
    ray.start_s["cold"] = 590.0
    processes.warm(["a", "cold"], ["a"])
    ray.now_s += 589.0
    processes.warm(["a", "cold"], ["a"])
    assert not processes.problems()
    ray.now_s += 1.0
    processes.warm(["a", "cold"], ["a"])
    assert processes.newly_ready()[-1] == ("cold", 590.0)


def test_nodes_are_compared_with_those_that_live_and_stay(ray: FakeRay) -> None:
    """Fast nodes are reclaimed, and slower ones are all that is left."""
    processes = pool()
    ray.health |= {"fast": Health(67e12, 1e12), "going": Health(67e12, 1e12)}
    ray.health |= {"slow": Health(19e12, 1e12), "slower": Health(18e12, 1e12)}
    group(processes, ray, "fast", "going")
    processes.observe([Node("going", 1, leaves_at=ray.now_s + 30), Node("slow", 1), Node("slower", 1)])
    assert len(group(processes, ray, "slow", "slower")) == 2
    assert not processes.problems()


def test_an_unfit_node_is_excluded_longer_each_time(ray: FakeRay) -> None:
    """An unfit node is left out longer each time and never for ever."""
    processes = pool()
    ray.health["slow"] = Health(1e11, 1e11)
    group(processes, ray, "a")
    for out_s in (60.0, 120.0, 240.0):
        with pytest.raises(UnfitNodesError, match=r"multiplies .*10%"):
            group(processes, ray, "a", "slow")
        ray.now_s += out_s - 1.0
        assert processes.problems().keys() == {"slow"}
        ray.now_s += 1.0
        assert not processes.problems()
    ray.health["slow"] = FIT  # it was only warm
    assert len(group(processes, ray, "a", "slow")) == 2


@pytest.mark.parametrize(("again", "fits"), [(900e6, True), (50e6, False)])
def test_a_network_that_many_share_is_measured_again_before_the_verdict(ray: FakeRay, again: float, fits: bool) -> None:
    processes = pool({"late": again})
    ray.health |= {"a": FIT._replace(network_bytes_per_s=1e9), "late": FIT._replace(network_bytes_per_s=80e6)}
    group(processes, ray, "a")
    if fits:
        assert len(group(processes, ray, "late")) == 1
    else:
        with pytest.raises(UnfitNodesError, match=r"network .* 8%"):
            group(processes, ray, "late")


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_node_that_was_lost_is_not_an_alarm(ray: FakeRay, caplog: pytest.LogCaptureFixture, is_silent: bool) -> None:
    """Its processes end before Ray knows of the node's end, or before it stops to answer."""
    processes = pool()
    ray.health["lost"], ray.silent = RayError("The actor never ran"), {"lost"} if is_silent else set()
    with pytest.raises(WorkerGroupStartupFailedError, match="does not answer" if is_silent else "The actor never ran"):
        group(processes, ray, "lost")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    ray.now_s += 30.0
    assert not processes.problems()


def test_a_node_that_loses_processes_is_excluded_longer_each_time(
    ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that loses each process is left out longer each time and said to be."""
    processes = pool()
    ray.health["broken"] = RayError("No module named torch")
    for out_s in (30.0, 120.0, 240.0):
        with pytest.raises(WorkerGroupStartupFailedError, match="No module named torch"):
            group(processes, ray, "broken")
        ray.now_s += out_s - 1.0
        assert processes.problems().keys() == {"broken"}
        ray.now_s += 1.0
        assert not processes.problems()
    assert [record.levelname for record in caplog.records if record.levelname != "INFO"] == ["WARNING"] * 2


def test_a_node_that_stays_silent_is_looked_at_less_and_less(ray: FakeRay) -> None:
    processes, out = pool(), []
    ray.health["cut off"], ray.silent = RayError("The actor never ran"), {"cut off"}
    for _ in range(4):
        with pytest.raises(WorkerGroupStartupFailedError):
            group(processes, ray, "cut off")
        begin_s = ray.now_s
        while processes.problems():
            ray.now_s += 1.0
        out.append(ray.now_s - begin_s)
    assert out == [30.0, 60.0, 120.0, 240.0]
    processes.observe([])
    assert not processes._failures  # one that is gone is forgotten


def workers(ray: FakeRay, *taken: WorkerProcess) -> list[Any]:
    """The workers of a group, as Ray keeps them."""
    return [SimpleNamespace(actor=process.actor, metadata=ray.metadata(process.actor)) for process in taken]


def test_survivors_hold_the_newest_state_before_they_train(ray: FakeRay) -> None:
    """Survivors that have the newest state together hold it before they train again."""
    processes = pool()
    taken = group(processes, ray, *"abcdef")  # three copies of two shards
    steps = {"c": 8, "d": 9, "e": 9, "f": 8}
    ray.offers = {
        node: LiveShard(rank, steps[node], rank % 2, 2) for rank, node in enumerate("abcdef") if node in steps
    }
    processes.reclaim(workers(ray, *taken), {"a", "b"})
    assert ray.settled == {"c": (), "d": (3, 4), "e": (3, 4), "f": ()}
    assert ray.alive == list("cdef")
    assert [process.node for process in group(processes, ray, *"cdef")] == list("cdef")
    assert len(ray.started) == 6  # nothing new


def test_a_process_that_settles_too_late_is_ended(ray: FakeRay) -> None:
    """A process that does not settle its state in time is ended."""
    processes = pool()
    taken = group(processes, ray, *"abc")
    ray.offers = {node: LiveShard(rank, 8, 0, 1) for rank, node in enumerate("abc") if node != "a"}
    ray.settle_s["b"] = math.inf
    before_s = ray.now_s
    processes.reclaim(workers(ray, *taken), {"a"})
    assert ray.alive == ["c"]
    assert ray.now_s - before_s < 60.0


def test_closing_ends_all_processes_and_forgets_lost_nodes(ray: FakeRay) -> None:
    """What is gone is forgotten and all that is left ends together."""
    processes = pool()
    for number in range(50):  # spot nodes come and go
        processes.reclaim(workers(ray, *group(processes, ray, "a", f"spot-{number}")), {f"spot-{number}"})
        processes.observe([Node("a", 1)])
    assert len(processes._all) == 1
    assert processes._health.keys() == {"a"}
    processes.warm(["a", *"bcdefgh"], [])
    before, ray.killed = ray.now_s, []
    processes.close()
    assert len(ray.killed) == 8
    assert ray.now_s - before <= 3.0  # for all of them
    with pytest.raises(WorkerGroupStartupFailedError, match="ended"):
        group(processes, ray, "z")
    assert ray.alive == []


def test_a_process_that_starts_while_all_are_ended_is_ended_too(ray: FakeRay) -> None:
    """The driver ends everything in one thread while the controller starts a process in another."""
    processes = pool()

    def start(node: str, name: str) -> Any:
        actor = ray.start(node)
        processes.close()  # before it knows of this one
        return actor

    assert processes._job is not None
    processes.prepare(("a",), processes._job)
    with pytest.raises(WorkerGroupStartupFailedError, match="ended"):
        processes.take(start)
    assert ray.alive == []


def test_free_processes_of_nodes_that_are_gone_are_not_kept(ray: FakeRay) -> None:
    processes = pool()
    processes.give_back(group(processes, ray, "a", "b"))
    processes.observe([Node("a", 1)])
    assert processes.ready(()) == {"a": 1}
    assert len(processes._all) == 1


def test_a_wait_ends_when_a_process_is_ready(ray: FakeRay) -> None:
    processes = pool()
    processes.give_back(group(processes, ray, "a"))
    processes.warm(["a", "b"], [])
    before = ray.now_s
    assert processes.wait(60.0)
    assert ray.now_s == before + 5.0
    processes._closed.set()
    assert processes.wait(60.0)


def test_processes_that_come_up_singly_cost_few_looks(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that come up one by one are looked at few times.

    Each look asks Ray for all that are waited for: one look for each process would be as many as their square."""
    nodes = [f"n{number}" for number in range(64)]
    ray.start_s |= {node: 5.0 + number / 100 for number, node in enumerate(nodes)}
    looks, wait = list[int](), ray.wait
    monkeypatch.setattr(ray, "wait", lambda refs, *rest, **how: looks.append(len(refs)) or wait(refs, *rest, **how))
    processes = pool()
    assert [process.node for process in group(processes, ray, *nodes)] == nodes
    assert len(looks) < 40 + len(nodes)  # one for each answer
    assert sum(looks) < 12 * len(nodes)
