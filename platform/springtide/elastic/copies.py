"""Place copies of each node's in-memory snapshots on other nodes that should not fail together with it.

    nodes of zone a | zone b | zone c       a circle of nodes, sorted by failure domain and within a domain by a hash
    a1 a2 a3 a4       b1 b2    c1 c2        a node's copy is placed half a circle further on: a1 -> b1, ..., c2 -> a4

A failure domain is a set of nodes that may fail together, such as a zone or a rack. If a domain has at most half of the nodes,
the node half a circle further on is always in another domain, at every level (region, zone, rack). Every node holds the same
number of copies. If a worker group fails, the functions at the end of this file find the surviving ranks whose devices together
hold the newest complete training state.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

Domain = tuple[str, ...]
"""Failure domain of a node, from the widest level to the narrowest (region, zone, rack); an empty name: level not known."""


def place(
    nodes: Iterable[str], domains: Mapping[str, Domain], copies: int, leaving: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return node -> the nodes that hold copies of its in-memory snapshots, sorted so that nodes in other failure domains come
    first. The result depends only on the arguments, and every node holds the same number of copies. Takes O(n log n) time.

    Args:
        nodes: nodes whose snapshots are copied; each of them may hold copies of other nodes' snapshots.
        domains: failure domain of each node. All nodes without a domain count as one domain.
        copies: number of copies of each node's snapshots; fewer if there are too few nodes.
        leaving: nodes that will be taken away. They hold no copies; copies of their own snapshots are spread over all other
            nodes.

    Examples:
        >>> place(["a1", "a2", "b1", "b2"], {"a1": ("a",), "a2": ("a",), "b1": ("b",), "b2": ("b",)}, 1)
        {'a1': ('b2',), 'a2': ('b1',), 'b2': ('a1',), 'b1': ('a2',)}
    """
    leaving = set(leaving)
    circle = _circle(nodes, domains)
    held = [node for node in circle if node not in leaving]
    found = {node: _ahead(held, place, min(copies, len(held) - 1)) for place, node in enumerate(held)}
    keys, last = [_key(node, domains) for node in held], -1
    for node in circle:
        if node in leaving:
            # `last + 1`: two leaving neighbours on the circle must not put their copies on the same node
            last = max(last + 1, bisect.bisect_left(keys, _key(node, domains)))
            found[node] = _ahead(held, last, min(copies, len(held)))
    if copies > 1:
        for node, holders in found.items():
            holders.sort(key=functools.partial(shared, domains, node))
    return {node: tuple(found[node]) for node in circle}


def preferred(
    node: str, nodes: Collection[str], domains: Mapping[str, Domain], copies: int, leaving: Collection[str] = ()
) -> list[str]:
    """Return all nodes that may hold copies of the snapshots of ``node``, best first. First come the nodes that ``place``
    returns, then nodes in other failure domains, then nodes in the same domain. The arguments are those of ``place``.

    Examples:
        >>> preferred("a1", ["a1", "a2", "b1", "b2"], {"a1": ("a",), "a2": ("a",), "b1": ("b",), "b2": ("b",)}, 1)
        ['b2', 'b1', 'a2']
    """
    placed = place(nodes, domains, copies, leaving)[node]
    circle = [one for one in _circle(nodes, domains) if one not in leaving]
    begin = circle.index(placed[0]) if placed else 0
    others = [one for one in circle[begin:] + circle[:begin] if one != node and one not in placed]
    return [*placed, *sorted(others, key=lambda one: shared(domains, node, one))]


def shared(domains: Mapping[str, Domain], one: str, other: str) -> int:
    """Return how many levels of known failure domains two nodes share; 0 if they differ at the widest level.

    Examples:
        >>> shared({"a": ("east", "rack 1"), "b": ("east", "rack 2"), "c": ("west", "rack 1")}, "a", "b")
        1
    """
    number = 0
    for mine, theirs in zip(domains.get(one, ()), domains.get(other, ()), strict=False):
        if mine != theirs:
            break
        number += bool(mine)
    return number


def _circle(nodes: Iterable[str], domains: Mapping[str, Domain]) -> list[str]:
    return sorted(set(nodes), key=lambda node: _key(node, domains))


def _key(node: str, domains: Mapping[str, Domain]) -> tuple[Domain, bytes, str]:
    """Return the key by which nodes are sorted into a circle. Within a failure domain the order is by hash, because nodes with
    neighbouring names may be lost together."""
    return domains.get(node, ()), _hash(node), node


@functools.lru_cache(maxsize=1 << 16)
def _hash(node: str) -> bytes:
    return hashlib.blake2b(node.encode(), digest_size=8).digest()


def _ahead(circle: list[str], here: int, number: int) -> list[str]:
    """Return ``number`` nodes at even distances on ``circle`` (a sorted list that wraps around), counted from index ``here``.
    The node at ``here`` is among them only if ``number`` is the size of the circle."""
    size = len(circle)
    return [circle[(here + turn * size // (number + 1)) % size] for turn in range(1, number + 1)]


# Find the survivors of a lost worker group that together still hold the newest complete state on their devices.


class LiveShard(NamedTuple):
    """A shard of the training state that a rank still has on its device, as it was after a whole step."""

    rank: int
    step: int
    """Number of training steps that the state includes."""
    shard: int
    """Index of the shard, from 0."""
    num_shards: int
    """Number of shards of the whole state; each copy of the model has all of them."""


def newest_holders(offers: Iterable[LiveShard]) -> tuple[int, ...]:
    """Return the ranks, ascending, that hold the newest complete training state. A state is complete if surviving ranks
    together have every shard of one step. Empty if no step is complete. The ranks' steps may differ by one: if a group fails in
    an all-reduce, the all-reduce may complete on only some ranks.

    Examples:
        >>> newest_holders([LiveShard(1, 7, 1, 2), LiveShard(2, 7, 0, 2), LiveShard(3, 8, 1, 2)])
        (1, 2)
    """
    by_step = defaultdict[int, list[LiveShard]](list)
    for offer in offers:
        by_step[offer.step].append(offer)
    for _, here in sorted(by_step.items(), reverse=True):
        if covers([offer.shard for offer in here], here[0].num_shards):
            return tuple(sorted(offer.rank for offer in here))
    return ()


def covers(shards: Collection[int], num_shards: int) -> bool:
    """Return whether ``shards`` contains every shard index below ``num_shards``.

    Examples:
        >>> covers([1, 0, 1], 2), covers([1, 1], 2)
        (True, False)
    """
    return set(shards) == set(range(num_shards))


def replicas_lost(nodes: Sequence[str], gone: Collection[str], num_shards: int) -> bool:
    """Return True if some shard of the training state is on no surviving node.

    Args:
        nodes: the node of each rank. Ranks 0 to ``num_shards`` - 1 hold one shard each, the next ``num_shards`` ranks hold the
            same shards again, and so on.
        gone: nodes that are lost.
        num_shards: shards of the whole state; 1 if each rank holds all of it (DDP).

    Examples:
        >>> replicas_lost("abcd", {"a", "b"}, num_shards=2), replicas_lost("abcd", {"a", "c"}, num_shards=2)
        (False, True)
    """
    return not covers({rank % num_shards for rank, node in enumerate(nodes) if node not in gone}, num_shards)
