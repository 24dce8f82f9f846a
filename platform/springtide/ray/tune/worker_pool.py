"""A pool of a cluster's workers, which the runs of a sweep share as ``elastic/allocation.py`` decides. The pool is one actor on
the driver's node."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.config import Config
from springtide.elastic.allocation import Allocation, ResourceRequest, WorkerShare, allocate
from springtide.elastic.group_sizes import useful
from springtide.ray.cluster.nodes import NodeDeadlines, live, observed
from springtide.ray.names import name_of

_LOOK_S = 0.3
_BEAT_S = 5.0
"""Time between two heartbeats of a client (a process that trains trials) [s]."""
_SILENT_S = 120.0
"""A client that has not called for this long counts as gone [s]."""


class WorkerPool:
    """The pool's actor: keeps the clients' requests for workers, and decides which workers each client gets."""

    def __init__(self, resources: dict[str, float]) -> None:
        """``resources``: resources of one worker, the same for all runs."""
        self._resources = resources
        self._claims: dict[str, ResourceRequest] = {}
        self._heard_s: dict[str, float] = {}
        self._shares: Allocation = {}
        self._places: dict[str, int] = {}
        self._looked_s = float("-inf")
        self._closed = False
        self._most: int | None = None
        """The largest number of workers worth their cost for a run, by the measured speeds; None if that is not known."""

    def claim(self, claim: ResourceRequest) -> None:
        """Add a client's request for workers, or replace its earlier one."""
        self._claims[claim.client_id] = claim
        self._heard_s[claim.client_id] = time.monotonic()

    def set_score(self, client_id: str, score: float, speeds: Mapping[int, float]) -> None:
        """Set the score of a client's trial (higher is better). Use its run's speed at each world size [tokens/s] to estimate
        how many workers any run can use."""
        if client_id in self._claims:
            self._claims[client_id] = self._claims[client_id]._replace(score=score)
        self._most = useful(speeds) or self._most

    def beat(self, client_id: str) -> None:
        """Record that a client is alive, if it has a request."""
        if client_id in self._claims:
            self._heard_s[client_id] = time.monotonic()

    def release(self, client_id: str) -> None:
        """Drop a client's request."""
        self._claims.pop(client_id, None)
        self._heard_s.pop(client_id, None)

    def mine(self, request: ResourceRequest) -> dict[str, dict[str, float]]:
        """Return node -> resources that the client of ``request`` may use there. If the client was silent for too long, the
        pool has dropped its request; ``request`` is then added again."""
        now, client_id = time.monotonic(), request.client_id
        self._claims.setdefault(client_id, request)
        self._heard_s[client_id] = now
        for other in [other for other, heard_s in self._heard_s.items() if now - heard_s > _SILENT_S]:
            self.release(other)
        self._look(now)
        self._shares = allocate(self._places, [one.limited(self._most) for one in self._claims.values()], self._shares)
        mine = self._shares.get(client_id, {})
        return {node: {kind: amount * n for kind, amount in self._resources.items()} for node, n in mine.items()}

    def close(self) -> None:
        """Close the pool: every client must save its run and stop."""
        self._closed = True

    def closed(self) -> bool:
        """Return whether the pool is closed."""
        return self._closed

    def places(self) -> int:
        """Return the number of workers that the cluster has room for now."""
        self._look(time.monotonic())
        return sum(self._places.values())

    def _look(self, now: float) -> None:
        if now - self._looked_s < _LOOK_S:
            return
        seen = live()
        there = {node["NodeID"]: node["Resources"] for node in seen}
        nodes = observed(seen, there, self._resources, NodeDeadlines())
        self._places = {node.id: node.places for node in nodes if node.leaves_at is None}
        self._looked_s = now


WorkerPoolHandle: TypeAlias = "ActorHandle[WorkerPool]"
"""Handle of a worker pool's actor."""


class WorkerPoolClient:
    """A process's client of a worker pool. The process trains one run after another in the workers that the client gets."""

    def __init__(self, pool: WorkerPoolHandle) -> None:
        self._pool, self._client_id = pool, uuid.uuid4().hex
        self._request: ResourceRequest | None = None
        self._released = threading.Event()

    def claim(self, config: Config) -> None:
        """Request workers for a run of ``config``."""
        elastic, worker_multiple = config.elastic, max(1, config.parallel.shards)
        workers = elastic.min_workers, elastic.max_workers
        request = ResourceRequest(self._client_id, *workers, worker_multiple=worker_multiple)
        ray.get(self._pool.claim.remote(request))
        if self._request is None:  # heartbeats cover the minutes in which the run's processes start
            self._released = threading.Event()
            name, given = "springtide-worker-pool", (self._released,)
            threading.Thread(target=self._beat, args=given, name=name, daemon=True).start()
        self._request = request

    def set_score(self, score: float, speeds: Mapping[int, float]) -> None:
        """Report the run's score (higher is better), and its speed at each world size [tokens/s]."""
        self._pool.set_score.remote(self._client_id, score, speeds)

    def release(self) -> None:
        """Withdraw the request."""
        self._released.set()
        self._request = None
        self._pool.release.remote(self._client_id)

    def mine(self, timeout_s: float, holds: Mapping[str, int] | None = None, most: int = 0) -> WorkerShare:
        """Return the workers that the run may use. ``holds`` and ``most`` are ignored; only ``QueueClient`` uses them. Raises
        RayError if the pool does not answer."""
        if self._request is None:
            return WorkerShare({})
        return WorkerShare(ray.get(self._pool.mine.remote(self._request), timeout=timeout_s))

    def closed(self) -> bool:
        """Return True if no client may continue: the pool is closed, or has ended with its sweep."""
        try:
            return bool(ray.get(self._pool.closed.remote()))
        except ActorDiedError:
            return True
        except ActorUnavailableError:  # the connection broke; the next call shows whether the pool has died
            return False

    def _beat(self, released: threading.Event) -> None:
        # check the connection to Ray first: without one, a call to an actor would start a cluster
        while not released.wait(_BEAT_S) and ray.is_initialized():
            with contextlib.suppress(RayError):
                self._pool.beat.remote(self._client_id)


@contextlib.contextmanager
def open_worker_pool(resources: dict[str, float], owner: str = "springtide") -> Iterator[WorkerPoolHandle]:
    """Yield a new pool, which ends with the block. ``owner`` is the sweep's name."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = name_of(owner, "worker-pool")
    pool = ray.remote(WorkerPool).options(name=name, num_cpus=0, scheduling_strategy=here).remote(resources)
    try:
        yield pool
    finally:
        ray.kill(pool)
