"""Place copies of what nodes hold in memory on other nodes, so that what fails together does not hold both.

    nodes of zone a | zone b | zone c       sorted by failure domain; within one, by a hash
    a1 a2 a3 a4       b1 b2    c1 c2        the copies of a node lie half a circle further on: a1 -> b1, ..., c2 -> a4

Half a circle further on is another domain wherever the domain has at most half of the nodes, at every level at once, and each
node holds as many copies as any other.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Collection, Iterable, Mapping

Domain = tuple[str, ...]
"""Failure domain of a node, from the widest level to the narrowest (region, zone, rack); an empty name is unknown."""


def place(
    nodes: Iterable[str], domains: Mapping[str, Domain], copies: int, leaving: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return the nodes that hold the copies of each of ``nodes``, those of other domains first: deterministic, and each node
    holds equally many. Takes n log n time.

    Args:
        nodes: the nodes of which copies are held; each one may hold copies of others.
        domains: the failure domain of each; a node without one is alone with the others of which none is known.
        copies: how many of each; fewer if there are too few nodes.
        leaving: those of the nodes that hold none, because they will be taken away. Their own copies are spread over the
            others.

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
            last = max(last + 1, bisect.bisect_left(keys, _key(node, domains)))  # neighbours do not share a holder
            found[node] = _ahead(held, last, min(copies, len(held)))
    return {node: tuple(sorted(found[node], key=lambda one: shared(domains, node, one))) for node in circle}


def preferred(
    node: str, nodes: Collection[str], domains: Mapping[str, Domain], copies: int, leaving: Collection[str] = ()
) -> list[str]:
    """Return all nodes that may hold copies of ``node``, best first: those of ``place``, then the others, of other domains
    first. The arguments are those of ``place``.

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
    """Return how many levels of known failure domains two nodes share: 0 if they are in different ones of the widest level.

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
    """Names may tell neighbours, which are lost together: within a domain the order is that of a hash."""
    return domains.get(node, ()), hashlib.blake2b(node.encode(), digest_size=8).digest(), node


def _ahead(circle: list[str], here: int, number: int) -> list[str]:
    """Return ``number`` nodes of a circle, spread evenly over it, without the one that is ``here``."""
    size = len(circle)
    return [circle[(here + turn * size // (number + 1)) % size] for turn in range(1, number + 1)]
