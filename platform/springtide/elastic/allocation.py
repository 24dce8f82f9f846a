"""Allocate the workers of a cluster that several runs share: the rule of the allocation ledger.

    places on each node + each run's request + what it holds -> each run's workers on each node

Runs are served by priority. Each gets its minimum while there is capacity; the rest goes to the run with the fewest
workers for its weight. A run keeps its workers and their nodes as long as that is equally fair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Allocation = dict[str, dict[str, int]]
"""Holder -> node -> workers."""


class ResourceRequest(NamedTuple):
    """The workers that a client, such as a run, can use."""

    client_id: str
    min_workers: int = 1
    max_workers: int = 1
    weight: float = 1.0
    worker_multiple: int = 1
    """Workers come in multiples of this."""
    priority: float = -math.inf
    """How well the client does; higher is better. Clients with the lowest priority lose workers first. Default:
    unknown, the lowest."""

    def limited(self, most: int | None) -> ResourceRequest:
        """Return the request, limited to ``most`` workers but not below ``min_workers``; None sets no limit."""
        return self if most is None else self._replace(max_workers=max(self.min_workers, min(most, self.max_workers)))


def allocate(
    places: Mapping[str, int], claims: Sequence[ResourceRequest], held: Mapping[str, Mapping[str, int]]
) -> Allocation:
    """Return what each run gets: no workers, or ``min_workers`` to ``max_workers``. ``places``: workers that fit on
    each node; ``claims``: in order of arrival; ``held``: the previous allocation."""
    ranked = sorted(claims, key=lambda claim: -claim.priority)
    sizes = _sizes(sum(places.values()), ranked, {run: sum(nodes.values()) for run, nodes in held.items()})
    left, shares = dict(places), {claim.client_id: dict[str, int]() for claim in claims}
    for claim in ranked:  # first what each keeps, so that no worker moves in favor of another run
        for node, number in held.get(claim.client_id, {}).items():
            _take(shares[claim.client_id], left, node, min(number, sizes[claim.client_id]))
            sizes[claim.client_id] -= shares[claim.client_id].get(node, 0)
    for claim in ranked:
        for node in sorted(left, key=lambda node: (node not in shares[claim.client_id], -left[node], node)):
            before = shares[claim.client_id].get(node, 0)
            _take(shares[claim.client_id], left, node, sizes[claim.client_id])
            sizes[claim.client_id] -= shares[claim.client_id].get(node, 0) - before
    return shares


def _sizes(total: int, ranked: Sequence[ResourceRequest], held: Mapping[str, int]) -> dict[str, int]:
    """Return the number of workers of each run."""
    sizes = dict.fromkeys((claim.client_id for claim in ranked), 0)
    for claim in ranked:
        least = -(-claim.min_workers // claim.worker_multiple) * claim.worker_multiple
        if least <= total:
            sizes[claim.client_id], total = least, total - least
    while True:
        growing = [
            claim
            for claim in ranked
            if sizes[claim.client_id]
            and claim.worker_multiple <= total
            and sizes[claim.client_id] + claim.worker_multiple <= claim.max_workers
        ]
        if not growing:
            return sizes

        def poverty(claim: ResourceRequest) -> tuple[float, bool]:
            return sizes[claim.client_id] / claim.weight, held.get(claim.client_id, 0) <= sizes[claim.client_id]

        poorest = min(growing, key=poverty)
        sizes[poorest.client_id] += poorest.worker_multiple
        total -= poorest.worker_multiple


def _take(share: dict[str, int], left: dict[str, int], node: str, number: int) -> None:
    taken = max(0, min(number, left.get(node, 0)))
    if taken:
        share[node] = share.get(node, 0) + taken
        left[node] -= taken
