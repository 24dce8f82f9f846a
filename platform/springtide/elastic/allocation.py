"""Allocate the workers of a cluster that several runs share.

    places on each node + each run's request + each run's current workers -> each run's workers on each node

A place is room for one worker. Requests of a higher priority are served in full first. If runs have equal priority, each run
first gets its minimum while there is capacity, in order of score and then of arrival. Each further worker goes to the run that
has the fewest workers in proportion to its weight. Ties are decided so that runs keep the workers that they already have. The
runs of a queue together get at most as many workers as the quota of the queue.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Allocation = dict[str, dict[str, int]]
"""Client id (a run) -> node -> number of workers that the client may have there."""


class ResourceRequest(NamedTuple):
    """The workers that a client, such as a run, can use."""

    client_id: str
    min_workers: int = 1
    max_workers: int = 1
    weight: float = 1.0
    worker_multiple: int = 1
    """The number of workers must be a multiple of this."""
    score: float = -math.inf
    """How good the client is, for example by the objective of its training; higher is better. Clients with the lowest score
    lose workers first. The default is the lowest possible score."""
    priority: int = 0
    """Requests of a higher priority are served in full first."""
    queue: str = ""
    """The queue that the client is in. A queue may have a quota: a limit on the workers of all its clients together."""
    resources: tuple[tuple[str, float], ...] = ()
    """(kind, amount) of each resource that one worker needs, for ``share_cluster``."""

    @property
    def least(self) -> int:
        """``min_workers``, rounded up to a multiple of ``worker_multiple``."""
        return -(-self.min_workers // self.worker_multiple) * self.worker_multiple

    def limited(self, most: int | None) -> ResourceRequest:
        """Return the request, limited to ``most`` workers but not below ``min_workers``; None sets no limit."""
        return self if most is None else self._replace(max_workers=max(self.min_workers, min(most, self.max_workers)))


class WorkerShare(NamedTuple):
    """The part of a shared cluster that a run may use."""

    nodes: dict[str, dict[str, float]]
    """Node -> resources that the run may use there."""
    others: str = ""
    """Text that explains why the run gets no more workers, or which runs get the workers that it loses; empty if neither
    applies."""


def allocate(
    places: Mapping[str, int],
    claims: Sequence[ResourceRequest],
    held: Mapping[str, Mapping[str, int]],
    quotas: Mapping[str, int] | None = None,
) -> Allocation:
    """Return how many workers each run gets on each node. A run gets either no workers, or from ``min_workers`` to
    ``max_workers`` in total.

    Args:
        places: node -> number of workers that fit on it, the same for all runs.
        claims: the requests of the runs, in order of arrival.
        held: the previous allocation: run -> node -> number of workers.
        quotas: queue -> workers that all its runs together may have; a queue without a quota is not limited.
    """
    ranked = ranking(claims)
    sizes = _sizes(
        sum(places.values()), ranked, {run: sum(nodes.values()) for run, nodes in held.items()}, quotas or {}
    )
    left, shares = dict(places), {claim.client_id: dict[str, int]() for claim in claims}
    for claim in ranked:  # first assign the workers that stay, so that none of them moves to make room
        for node, number in held.get(claim.client_id, {}).items():
            _take(shares[claim.client_id], left, node, min(number, sizes[claim.client_id]))
            sizes[claim.client_id] -= shares[claim.client_id].get(node, 0)
    # then assign new workers: first to nodes that the run uses already, then to the emptiest nodes, so that it spans few nodes
    emptiest = [(-number, node) for node, number in left.items()]
    heapq.heapify(emptiest)
    for claim in ranked:
        mine, wanted = shares[claim.client_id], sizes[claim.client_id]
        own = sorted((node for node in mine if node in left), key=lambda node: (-left[node], node)) if wanted else ()
        for node in own:
            wanted -= _take(mine, left, node, wanted)
        while wanted and emptiest:
            known, node = emptiest[0]
            if left[node] == -known:  # otherwise this heap entry is out of date; it is replaced below
                wanted -= _take(mine, left, node, wanted)
            if left[node]:
                heapq.heapreplace(emptiest, (-left[node], node))
            else:
                heapq.heappop(emptiest)
    return shares


def ranking(claims: Iterable[ResourceRequest]) -> list[ResourceRequest]:
    """Return the requests for workers in the order in which they are served; ``claims``: the requests in order of arrival."""
    return sorted(claims, key=lambda claim: (-claim.priority, -claim.score))


def share_cluster(
    nodes: Mapping[str, Mapping[str, float]],
    claims: Sequence[ResourceRequest],
    held: Mapping[str, Mapping[str, int]],
    quotas: Mapping[str, int] | None = None,
) -> Allocation:
    """Allocate workers that may need different resources in each run. Runs with the same priority and the same resources per
    worker form a group, which ``allocate`` serves. Groups are served by priority, then by the arrival of their first run.

    Args:
        nodes: node -> its resources.
        claims: the requests of the runs, in order of arrival.
        held: the previous allocation: run -> node -> number of workers.
        quotas: queue -> workers that all its runs together may have; a queue without a quota is not limited.

    Examples:
        >>> gpu = ResourceRequest("gpu", 1, 8, resources=(("CPU", 4.0), ("GPU", 1.0)))
        >>> cpu = ResourceRequest("cpu", 1, 8, resources=(("CPU", 1.0),), priority=-1)
        >>> share_cluster({"a": {"CPU": 8.0, "GPU": 1.0}, "b": {"CPU": 2.0}}, [cpu, gpu], {})
        {'gpu': {'a': 1}, 'cpu': {'a': 4, 'b': 2}}
    """
    left = {node: dict(resources) for node, resources in nodes.items()}
    allowed, found = dict(quotas or {}), Allocation()
    alike: dict[tuple[int, tuple[tuple[str, float], ...]], list[ResourceRequest]] = {}
    for claim in sorted(claims, key=lambda claim: -claim.priority):
        alike.setdefault((claim.priority, claim.resources), []).append(claim)
    for (_, worker), some in alike.items():
        places = {node: fits(resources, worker) for node, resources in left.items()}
        shares = allocate(places, some, {claim.client_id: held.get(claim.client_id, {}) for claim in some}, allowed)
        for claim in some:
            mine = found[claim.client_id] = shares[claim.client_id]
            if claim.queue in allowed:
                allowed[claim.queue] -= sum(mine.values())
            for node, number in mine.items():
                _use(left[node], worker, number)
    return found


def free_of(
    nodes: Mapping[str, Mapping[str, float]],
    claims: Sequence[ResourceRequest],
    shares: Mapping[str, Mapping[str, int]],
    holds: Mapping[str, Mapping[str, int]],
) -> Allocation:
    """Return how many workers of its share each run may use now: workers that it has already, and places that no run occupies.
    Other places of its share may still be occupied: a run that must give up workers keeps them until its current step is done.

    Args:
        nodes: node -> its resources.
        claims: the requests of the runs, in order of arrival.
        shares: what ``share_cluster`` returned.
        holds: the workers that each run has on each node.

    Examples:
        >>> one, two = (ResourceRequest(name, 1, 2, resources=(("CPU", 1.0),)) for name in ("one", "two"))
        >>> free_of({"a": {"CPU": 2.0}}, [one, two], {"one": {"a": 1}, "two": {"a": 1}}, {"one": {"a": 2}})
        {'one': {'a': 1}, 'two': {}}
    """
    left = {node: dict(resources) for node, resources in nodes.items()}
    for claim in claims:
        for node, number in holds.get(claim.client_id, {}).items():
            if node in left:
                _use(left[node], claim.resources, number)
    found = Allocation()
    for claim in ranking(claims):
        mine, here = found.setdefault(claim.client_id, {}), holds.get(claim.client_id, {})
        for node, number in shares.get(claim.client_id, {}).items():
            kept = min(number, here.get(node, 0))
            more = min(number - kept, fits(left[node], claim.resources)) if node in left else 0
            if more > 0:
                _use(left[node], claim.resources, more)
            if kept + max(0, more):
                mine[node] = kept + max(0, more)
    return found


def fits(resources: Mapping[str, float], worker: Iterable[tuple[str, float]]) -> int:
    """Return how many workers fit into ``resources``, if each needs the amounts in ``worker``; 0 if a worker needs nothing.
    Rounding is tolerated: three workers of 0.7 CPUs fit into 0.7 + 0.7 + 0.7 CPUs, a sum below 2.1 in floating point.

    Examples:
        >>> fits({"CPU": 8.0, "GPU": 2.0}, [("CPU", 2.0), ("GPU", 1.0)])
        2
    """
    return max(
        0, min((int(resources.get(kind, 0.0) / amount + 1e-9) for kind, amount in worker if amount > 0), default=0)
    )


def in_words(
    run: str,
    claims: Sequence[ResourceRequest],
    shares: Mapping[str, Mapping[str, int]],
    holds: Mapping[str, Mapping[str, int]],
    quotas: Mapping[str, int],
) -> str:
    """Explain as text why a run gets no more workers, or which runs get the workers that it loses; empty if neither applies.
    The arguments are described at ``share_cluster`` and ``free_of``.

    Examples:
        >>> small, big = ResourceRequest("small", 2, 2), ResourceRequest("big", 1, 4, priority=7)
        >>> in_words("small", [small, big], {"big": {"a": 4}}, {"big": {"a": 4}}, {})
        "'big' (priority 7) has 4 workers"
    """
    [mine] = [claim for claim in claims if claim.client_id == run]
    has, should = (sum(table.get(run, {}).values()) for table in (holds, shares))
    if not mine.max_workers or has == should > 0:
        return ""
    found = []
    for claim in ranking(claims):
        other, number = claim.client_id, sum(shares.get(claim.client_id, {}).values())
        slow = sum(holds.get(other, {}).values()) - number
        if other == run or not number:
            continue
        if has < should:
            found += [f"{other!r} gives up {_workers(slow)} after its step"] if slow > 0 else []
        else:
            verb = "gets" if has else "has"
            found.append(f"{other!r} (priority {claim.priority}) {verb} {_workers(number)}")
    quota = quotas.get(mine.queue)
    if quota is not None and (not should or has > should):
        found.append(f"queue {mine.queue!r} may have {_workers(quota)}")
    return ", ".join(found)


def _workers(number: int) -> str:
    return f"{number} worker" + ("" if number == 1 else "s")


def _use(left: dict[str, float], worker: Sequence[tuple[str, float]], number: int) -> None:
    for kind, amount in worker:
        left[kind] = left.get(kind, 0.0) - number * amount


def _sizes(
    total: int, ranked: Sequence[ResourceRequest], held: Mapping[str, int], quotas: Mapping[str, int]
) -> dict[str, int]:
    """Return run -> number of workers that it gets, out of ``total``; ``held``: run -> its current number of workers."""
    sizes = dict.fromkeys((claim.client_id for claim in ranked), 0)
    allowed = {claim.queue: quotas.get(claim.queue, total) for claim in ranked}

    def give(claim: ResourceRequest, number: int) -> None:
        nonlocal total
        sizes[claim.client_id] += number
        allowed[claim.queue] -= number
        total -= number

    def poverty(claim: ResourceRequest) -> tuple[float, bool]:
        # if runs have equal workers per weight, serve a run that would lose current workers first, so that fewer workers move
        return sizes[claim.client_id] / claim.weight, held.get(claim.client_id, 0) <= sizes[claim.client_id]

    for _, some in itertools.groupby(ranked, key=lambda claim: claim.priority):
        equals = list(some)
        for claim in equals:
            if claim.least <= min(total, allowed[claim.queue], claim.max_workers):
                give(claim, claim.least)
        # free capacity only shrinks in this loop, so a run that cannot grow now is not pushed back into the heap
        growing = [(poverty(claim), place) for place, claim in enumerate(equals) if sizes[claim.client_id]]
        heapq.heapify(growing)
        while growing:
            _, place = heapq.heappop(growing)
            poorest = equals[place]
            has_room = poorest.worker_multiple <= min(total, allowed[poorest.queue])
            if has_room and sizes[poorest.client_id] + poorest.worker_multiple <= poorest.max_workers:
                give(poorest, poorest.worker_multiple)
                heapq.heappush(growing, (poverty(poorest), place))
    return sizes


def _take(share: dict[str, int], left: dict[str, int], node: str, number: int) -> int:
    """Take room for up to ``number`` workers on ``node`` from ``left`` (free room by node), and add it to ``share`` (a run's
    workers by node). Return the number of workers for which there was room."""
    taken = max(0, min(number, left.get(node, 0)))
    if taken:
        share[node] = share.get(node, 0) + taken
        left[node] -= taken
    return taken
