"""The workers of a cluster that several runs share, dealt out by the capacity book. One actor, on the driver's node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.elastic.book import Claim, Shares, allot
from springtide.on_ray.nodes import observed

_LOOK_S = 0.3
_SILENT_S = 120.0
"""Who has not asked for so long is gone."""


class Pool:
    """What runs claim, and what they get."""

    def __init__(self, resources: dict[str, float]) -> None:
        """``resources``: of a worker; all runs have the same."""
        self._resources = resources
        self._claims: dict[str, Claim] = {}
        self._heard_s: dict[str, float] = {}
        self._shares: Shares = {}
        self._places: dict[str, int] = {}
        self._looked_s = float("-inf")
        self._closed = False

    def claim(self, claim: Claim, heir_of: str = "") -> None:
        """A run that wants workers, or wants others than before; it takes over what ``heir_of`` held."""
        if heir_of in self._claims and claim.run not in self._claims:
            self._shares[claim.run] = self._shares.pop(heir_of, {})
            self.release(heir_of)
        self._claims[claim.run] = claim
        self._heard_s[claim.run] = time.monotonic()

    def promise(self, run: str, promise: float) -> None:
        """How well a run does."""
        if run in self._claims:
            self._claims[run] = self._claims[run]._replace(promise=promise)

    def release(self, run: str) -> None:
        """A run that has ended."""
        self._claims.pop(run, None)
        self._heard_s.pop(run, None)

    def mine(self, run: str) -> dict[str, dict[str, float]]:
        """Node -> resources of a run that claims."""
        now = time.monotonic()
        self._heard_s[run] = now
        for other in [other for other, heard_s in self._heard_s.items() if now - heard_s > _SILENT_S]:
            self.release(other)
        self._look(now)
        self._shares = allot(self._places, list(self._claims.values()), self._shares)
        mine = self._shares.get(run, {})
        return {node: {kind: amount * n for kind, amount in self._resources.items()} for node, n in mine.items()}

    def close(self) -> None:
        """Nobody is to go on."""
        self._closed = True

    def closed(self) -> bool:
        """Whether that was said."""
        return self._closed

    def places(self) -> int:
        """Workers that the cluster holds now."""
        self._look(time.monotonic())
        return sum(self._places.values())

    def _look(self, now: float) -> None:
        if now - self._looked_s < _LOOK_S:
            return
        whole = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        nodes = observed(whole, self._resources)
        self._places = {node.id: node.places for node in nodes if node.leaves_at is None}
        self._looked_s = now


@contextlib.contextmanager
def open_pool(resources: dict[str, float]) -> Iterator[Any]:
    """A new pool, for as long as the block runs."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    pool = ray.remote(Pool).options(num_cpus=0, scheduling_strategy=here).remote(resources)
    try:
        yield pool
    finally:
        ray.kill(pool)
