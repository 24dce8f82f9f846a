"""The control plane at size, for benchmarks/scale.py: real code, stand-ins for Ray's processes and its control store."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from scale_counts import Calls, Cost, cost_of

RANKS_A_NODE = 8


def nodes_of(ranks: int) -> list[str]:
    """The node of each rank."""
    return [f"{rank // RANKS_A_NODE:056x}" for rank in range(ranks)]


def start(ranks: int, rounds: int) -> Cost:
    """The driver takes processes for a group: one is new on each node, the others are of the group before."""
    from springtide import config as configs
    from springtide.elastic.health import Health
    from springtide.ray.cluster import liveness
    from springtide.ray.cluster import nodes as cluster_nodes
    from springtide.ray.train import process_pool
    from springtide.ray.train.job import TrainJob
    from springtide.ray.train.process_pool import WorkerProcessPool

    called, health = Calls(), Health(1e12, 1e11, network_bytes_per_s=1e9)

    class Ref:
        pass

    class Actor:
        def __init__(self, *_: Any) -> None:
            self.metadata = SimpleNamespace(node_id=_[0])
            self.execute = SimpleNamespace(remote=lambda *_: called(Ref()))

    def wait(refs: list[Any], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Any], list[Any]]:
        return called((list(refs), []))

    ray = SimpleNamespace(
        wait=wait,
        get=lambda ref, timeout=None: health,
        put=lambda value: called(Ref()),
        kill=lambda actor: called(None),
    )
    nodes, job = tuple(nodes_of(ranks)), TrainJob(configs.recipes.tiny(), None)  # type: ignore[arg-type]
    pool = WorkerProcessPool()

    def prepare() -> None:
        nonlocal pool
        pool = WorkerProcessPool()
        pool.prepare(nodes, job)
        taken = pool.take(Actor)
        workers: list[Any] = [SimpleNamespace(actor=one.actor, metadata=one.actor.metadata) for one in taken]
        pool.reclaim(workers[::2], ())  # of the others nothing is known: they start anew

    def again() -> None:
        pool.prepare(nodes, job)
        assert len(pool.take(Actor)) == ranks

    with (
        mock.patch.object(process_pool, "ray", ray),
        mock.patch.object(liveness, "ray", ray),
        mock.patch.object(cluster_nodes, "unanswering", return_value=set()),
        mock.patch.object(process_pool, "_settled", lambda outcomes: [(worker, True) for worker, _ in outcomes]),
    ):
        return cost_of(again, rounds, called.spent, prepare)


def poll(ranks: int, rounds: int) -> Cost:
    """Calls to workers in a second of training, and one look of the policy at the nodes."""
    from springtide.elastic.policy import Bounds, Node, PolicyState, RestartForecast, WorkerGroup, decide
    from springtide.ray.train import ray_adapter as groups

    controller: Any = groups.Controller.__new__(groups.Controller)
    controller._shortest_look_s = 0.2
    with mock.patch.object(groups.TrainController, "_start_worker_group", return_value=None):
        controller._start_worker_group(ranks, {})
    names = nodes_of(ranks)
    bounds, group = Bounds(1, ranks), WorkerGroup(tuple(names))
    nodes = [Node(name, RANKS_A_NODE, ready=RANKS_A_NODE) for name in dict.fromkeys(names)]
    memory, looks = PolicyState(), 20

    def again() -> None:
        nonlocal memory
        for _ in range(looks):
            _, memory = decide(bounds, list(nodes), group, RestartForecast(step_s=1.0), memory, time.monotonic())

    found = cost_of(again, rounds)
    return found._replace(calls=round(ranks / controller._usual_look_s), cpu_s=found.cpu_s / looks)


def compare(ranks: int, rounds: int) -> Cost:
    """All ranks' devices are compared, in the step in which they were measured, on each rank."""
    from springtide.elastic.health import slow

    speeds = np.random.default_rng(0).normal(100.0, 5.0, ranks).tolist()
    return cost_of(lambda: slow(speeds), rounds)._replace(bytes=16 * ranks)  # of the all-reduce


def connections(ranks: int, rounds: int) -> Cost:
    """A rank finds which of its connections lead to its group: one to each rank. The bytes are those of the exchanges."""
    from springtide.distributed.connections import by_owner, is_shared

    draw = np.random.default_rng(0)
    mine = draw.integers(0, 2**63, ranks, dtype=np.uint64)
    # what the others send to this rank: both ends of about one connection for each of them
    theirs = np.repeat(draw.integers(0, 2**63, max(1, ranks // 2), dtype=np.uint64), 2)

    def again() -> None:
        names, sent = by_owner(mine, ranks)
        assert len(names) == sent.sum()
        assert is_shared(theirs).all()

    return cost_of(again, rounds)._replace(calls=3, bytes=8 * (2 * ranks + 2 * len(mine) + 2 * len(theirs)))


def queue(runs: int, rounds: int) -> Cost:
    """Trials share as many nodes, one of them ends, and the shares are computed again."""
    from springtide.elastic.allocation import ResourceRequest, free_of, share_cluster

    resources = (("CPU", 1.0),)
    nodes = {f"{one:08x}": {"CPU": float(RANKS_A_NODE)} for one in range(runs)}
    claims = [ResourceRequest(f"trial-{one}", 1, 16, resources=resources) for one in range(runs)]
    held = share_cluster(nodes, claims, {})

    def again() -> None:
        shares = share_cluster(nodes, claims[1:], held)
        free_of(nodes, claims[1:], shares, held)

    return cost_of(again, rounds)._replace(calls=runs)


def feed_start(ranks: int, rounds: int) -> Cost:
    """All ranks' pipelines start: what this costs the two actors of which a cluster has one, in Ray's own code: the one that
    shares resources out, and the one that Ray's dashboard asks."""
    from ray.data import DataContext
    from ray.data._internal import stats
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as coordinators
    from ray.data._internal.execution import streaming_executor
    from ray.data._internal.metadata_exporter import Topology

    from springtide.config.data import FeedConfig
    from springtide.ray.data.feed import limit

    asked: list[tuple[str, str, Any, Any]] = []
    table = [
        {"NodeID": name, "Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0, "memory": 1e12}, "Labels": {}}
        for name in dict.fromkeys(nodes_of(ranks))
    ]

    class Actor:
        """A handle of an actor: its calls are kept."""

        def __init__(self, who: str) -> None:
            self._who = who

        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *given, **named: asked.append((self._who, method, given, named)))

    context = SimpleNamespace(get_job_id=lambda: "01000000")
    with (
        mock.patch.object(coordinators, "get_or_create_autoscaling_coordinator", return_value=Actor("coordinator")),
        mock.patch.object(stats, "get_or_create_stats_actor", return_value=Actor("dashboard")),
        mock.patch.object(stats.ray, "get", side_effect=lambda _: len(asked)),
        mock.patch.object(stats.ray, "get_runtime_context", return_value=context),
    ):
        for _ in range(ranks):
            limits = DataContext()
            limit(limits, FeedConfig())
            name = f"rank_{stats._StatsManager.gen_dataset_id_from_stats_actor()}"
            streaming_executor.create_cluster_autoscaler({}, SimpleNamespace(), limits, execution_id=name)
            stats._StatsManager.register_dataset_to_stats_actor(name, ["reads"], Topology([]), limits)

    def again() -> None:
        actors = {
            "coordinator": coordinators._AutoscalingCoordinatorActor(
                send_resources_request=lambda *_, **__: None, get_cluster_nodes=lambda: table
            ),
            "dashboard": stats._StatsActor.__ray_metadata__.modified_class(),
        }
        for who, method, given, named in asked:
            getattr(actors[who], method)(*given, **named)

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return cost_of(again, rounds)._replace(calls=len(asked))
