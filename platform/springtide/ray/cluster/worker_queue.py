"""The queue of a cluster: it decides which run gets which workers. One actor, on the head node.

    a run's driver --QueueClient: workers requested and held--> WorkerQueue --workers it may use now--> the run's policy

The rule is in ``elastic/allocation.py``. Each call carries all data of a run that the queue needs. So a restarted actor has the
data of all runs again once each run has called. Only the quotas (most workers of a queue) are stored, in Ray's control store.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.config import Config
from springtide.elastic.allocation import (
    Allocation,
    ResourceRequest,
    WorkerShare,
    free_of,
    in_words,
    ranking,
    share_cluster,
)
from springtide.errors import ConfigError, explain
from springtide.ray._ray_private import HEAD, read_key, state, write_key
from springtide.ray.cluster.nodes import live
from springtide.ray.cluster.session import NAMESPACE

ACTOR = "springtide/queue"
_QUOTAS = b"springtide/quotas"
_LOOK_S = 0.3
_BEAT_S = 5.0
"""Time between two heartbeats of a driver, which show that it is alive while its policy is too busy to call [s]."""
_SILENT_S = 30.0
"""A run whose driver has not called for this long counts as gone [s]."""
_SETTLE_S = 3.0
"""For this long after a restart, the queue grants no run more workers than the run has, because not all runs have called yet
[s]."""
_ANSWER_S = 10.0


class QueueRow(NamedTuple):
    """A line of ``springtide queue``: one run that shares the cluster."""

    run: str
    queue: str
    priority: int
    holds: int
    """Workers that the run has."""
    share: int
    """Workers that the queue has assigned to the run. Other runs may still hold some of them."""
    min_workers: int
    max_workers: int
    others: str
    """What the run waits for, or to which runs it gives workers; empty if neither."""


class WorkerQueue:
    """The runs' requests for workers, and the workers assigned to each run."""

    def __init__(self) -> None:
        self._requests: dict[str, ResourceRequest] = {}
        """Run -> its request, in order of arrival."""
        self._holds: dict[str, dict[str, int]] = {}
        """Run -> node -> number of workers: those that the run held at its last call, or was granted in that call."""
        self._heard_s: dict[str, float] = {}
        self._shares: Allocation = {}
        self._nodes: dict[str, dict[str, float]] = {}
        self._quotas = read_quotas()
        self._looked_s = float("-inf")
        self._changed = self._stale = True
        """``_changed``: the runs or the nodes have changed, so the workers assigned to each run must be computed again.
        ``_stale``: the workers that some run holds have changed, so the workers that each run may use now must be computed
        again."""
        self._granted: Allocation = {}
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._settled_s = time.monotonic() + (_SETTLE_S if again else 0.0)

    def mine(self, request: ResourceRequest, holds: Mapping[str, int]) -> WorkerShare:
        """Record a run's request for workers, and the workers that the run holds on each node. Returns the workers that it may
        use now."""
        run = request.client_id
        self._beat(run)
        self._changed |= self._requests.get(run) != request
        self._stale |= self._holds.get(run) != holds
        self._requests[run], self._holds[run] = request, dict(holds)
        self._look()
        granted: Mapping[str, int] = holds
        if time.monotonic() >= self._settled_s:
            if self._stale:  # only after a change: a hundred runs may call
                requests = list(self._requests.values())
                self._granted = free_of(self._nodes, requests, self._shares, self._holds)
                self._stale = False
            granted = self._granted[run]
        self._holds[run] = {n: max(holds.get(n, 0), granted.get(n, 0)) for n in {*holds, *granted}}
        nodes = {node: {kind: amount * n for kind, amount in request.resources} for node, n in granted.items()}
        return WorkerShare(nodes, self._others(run))

    def beat(self, run: str) -> None:
        """Record that the driver of a run is alive."""
        if run in self._requests:
            self._beat(run)

    def release(self, run: str) -> bool:
        """Remove a run from the queue. Returns True if other runs are left."""
        for known in (self._requests, self._holds, self._heard_s, self._shares):
            known.pop(run, None)
        self._changed = True
        return bool(self._requests)

    def rows(self) -> list[QueueRow]:
        """Return the runs in the order in which they are served."""
        self._look()
        return [
            QueueRow(
                one.client_id,
                one.queue,
                one.priority,
                sum(self._holds[one.client_id].values()),
                sum(self._shares[one.client_id].values()),
                one.min_workers,
                one.max_workers,
                self._others(one.client_id),
            )
            for one in ranking(self._requests.values())
        ]

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Limit the workers of each queue. ``quotas``: queue -> the most workers that its runs may have together."""
        self._quotas, self._changed = dict(quotas), True

    def _beat(self, run: str) -> None:
        self._heard_s[run] = time.monotonic()

    def _others(self, run: str) -> str:
        return in_words(run, list(self._requests.values()), self._shares, self._holds, self._quotas)

    def _look(self) -> None:
        """Drop silent runs, read the cluster's nodes, and compute the workers assigned to each run again if something has
        changed."""
        now = time.monotonic()
        for run in [run for run, heard_s in self._heard_s.items() if now - heard_s > _SILENT_S]:
            self.release(run)
        if now - self._looked_s >= _LOOK_S:
            leaving = state.get_draining_nodes()
            nodes = {node["NodeID"]: node["Resources"] for node in live() if node["NodeID"] not in leaving}
            self._changed |= nodes != self._nodes
            self._nodes, self._looked_s = nodes, now
        if self._changed:
            self._shares = share_cluster(self._nodes, list(self._requests.values()), self._shares, self._quotas)
            self._changed, self._stale = False, True


class QueueClient:
    """A run's client of the cluster's queue."""

    def __init__(self) -> None:
        self._request: ResourceRequest | None = None
        self._actor: ActorHandle[WorkerQueue] | None = None
        self._released = threading.Event()

    def claim(self, config: Config) -> None:
        """Request workers for a run."""
        beats, self._request = self._request is not None, request_of(config)
        if not beats:
            self._released.clear()
            threading.Thread(target=self._beat, name="springtide-queue", daemon=True).start()

    def release(self) -> None:
        """Withdraw the run's request. If no other run is left, the queue's actor is ended."""
        self._released.set()
        if self._request is None or self._actor is None:
            return
        with contextlib.suppress(RayError):
            if not ray.get(self._actor.release.remote(self._request.client_id), timeout=_ANSWER_S):
                ray.kill(self._actor)  # a run that registers at this moment starts a new queue
        self._request = self._actor = None

    def mine(self, timeout_s: float, holds: Mapping[str, int], most: int) -> WorkerShare:
        """Return the workers that the run may use now.

        Args:
            timeout_s: how long to wait for the queue.
            holds: the workers that the run has on each node.
            most: the most workers that the run can use now; 0 while it is paused.

        Raises:
            RayError: the queue does not answer; it may be restarting.
        """
        assert self._request is not None, "a run claims before it asks"
        if self._actor is None:
            self._actor = _queue()
        asked = self._request._replace(max_workers=min(most, self._request.max_workers))
        try:
            found: WorkerShare = ray.get(self._actor.mine.remote(asked, dict(holds)), timeout=timeout_s)
        except ray.exceptions.RayActorError:
            self._actor = None
            raise
        return found

    def closed(self) -> bool:
        """Return False: unlike a sweep's worker pool, the cluster's queue never ends a run."""
        return False

    def _beat(self) -> None:
        # check the connection to Ray first: without one, a call to an actor would start a cluster
        while not self._released.wait(_BEAT_S) and ray.is_initialized():
            actor, request = self._actor, self._request
            if actor is not None and request is not None:
                with contextlib.suppress(RayError):  # a lost heartbeat does no harm: others follow
                    actor.beat.remote(request.client_id)


def request_of(config: Config) -> ResourceRequest:
    """Return the resource request that a run of ``config`` sends to the cluster's queue."""
    elastic = config.elastic
    worker = {"CPU": elastic.cpus_per_worker, "GPU": elastic.gpus_per_worker}
    return ResourceRequest(
        config.run.id,
        elastic.min_workers,
        elastic.max_workers,
        worker_multiple=max(1, config.parallel.shards),
        priority=config.run.priority,
        queue=config.run.queue,
        resources=tuple((kind, amount) for kind, amount in worker.items() if amount),
    )


def check_quota(config: Config) -> None:
    """Raise ConfigError if the quota of the run's queue is smaller than the least number of workers that the run needs.
    Requires a connection to the cluster."""
    least, quota = request_of(config).least, read_quotas().get(config.run.queue)
    if quota is not None and quota < least:
        problem = f"may have {quota} workers, and this run needs {least}"
        remedy = f"lower elastic.min_workers, or raise it: springtide queue --quota {config.run.queue}=N"
        raise ConfigError(explain("run.queue", config.run.queue, problem, remedy))


def queue_rows() -> list[QueueRow]:
    """Return the runs that share the connected cluster, in the order in which they are served; an empty list if the cluster has
    no queue."""
    with contextlib.suppress(ValueError):
        rows: list[QueueRow] = ray.get(ray.get_actor(ACTOR, namespace=NAMESPACE).rows.remote(), timeout=_ANSWER_S)
        return rows
    return []


def read_quotas() -> dict[str, int]:
    """Return queue -> the most workers that its runs may have together, from the connected cluster's control store."""
    found: dict[str, Any] = json.loads(read_key(_QUOTAS) or b"{}")
    return {name: number for name, number in found.items() if isinstance(number, int)}


def write_quotas(quotas: Mapping[str, int]) -> None:
    """Set all quotas of the connected cluster. Runs that have more workers than their quota allows leave after their current
    step."""
    write_key(_QUOTAS, json.dumps(dict(quotas), allow_nan=False).encode())
    with contextlib.suppress(ValueError):  # no queue runs: the next one reads the stored quotas
        ray.get(ray.get_actor(ACTOR, namespace=NAMESPACE).set_quotas.remote(dict(quotas)), timeout=_ANSWER_S)


def _queue() -> ActorHandle[WorkerQueue]:
    [head, *_] = [node["NodeID"] for node in live() if HEAD in node["Resources"]] or [""]
    options: dict[str, Any] = {"scheduling_strategy": NodeAffinitySchedulingStrategy(head, soft=True)} if head else {}
    actor = ray.remote(WorkerQueue).options(
        name=ACTOR,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        **options,
    )
    return actor.remote()
