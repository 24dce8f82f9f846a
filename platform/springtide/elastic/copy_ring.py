"""Which losses take every copy of a snapshot with them: copies in memory lie on the next nodes of a ring."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

Placement = Literal["name", "random", "domain"]
"""The order of the ring: of the nodes' names, so that neighbours may be of one rack or zone; of a hash, as Ray's ids are; or of
a hash, and copies in other failure domains where there are any."""


class CopyRing(NamedTuple):
    """Nodes in the order of their ring."""

    order: tuple[str, ...]
    domains: tuple[str, ...]
    """The failure domain of each; "" where none counts."""
    copies: int

    def is_lost(self, gone: Collection[str]) -> bool:
        """Return whether the snapshot of a node and all its copies are on nodes that are ``gone``.

        >>> ring = copy_ring("abcd", copies=1, placement="name")
        >>> ring.is_lost({"a", "c"}), ring.is_lost({"a", "b"}), ring.is_lost({"d", "a"})
        (False, True, True)
        """
        return any(node in gone and self._copies_lost(place, gone) for place, node in enumerate(self.order))

    def _copies_lost(self, place: int, gone: Collection[str]) -> bool:
        size, left = len(self.order), min(self.copies, len(self.order) - 1)
        used, passed = {self.domains[place]}, list[str]()
        for one in range(1, size):
            if not left:
                return True
            other = (place + one) % size
            if self.domains[other] and self.domains[other] in used:
                passed.append(self.order[other])
                continue
            if self.order[other] not in gone:
                return False
            used.add(self.domains[other])
            left -= 1
        return all(node in gone for node in passed[:left])  # there are fewer domains than copies


def copy_ring(
    nodes: Collection[str], copies: int, placement: Placement = "random", domains: Mapping[str, str] | None = None
) -> CopyRing:
    """Return the ring of ``nodes`` with ``copies`` of each snapshot; ``domains``: failure domains of the nodes that have one.

    >>> zones = {"a1": "a", "a2": "a", "b1": "b", "b2": "b"}
    >>> [copy_ring(zones, 1, way, zones).is_lost({"a1", "a2"}) for way in ("name", "domain")]
    [True, False]
    """
    by_hash = placement != "name"
    order = sorted(set(nodes), key=lambda node: (zlib.crc32(node.encode()) if by_hash else 0, node))
    known = (domains or {}) if placement == "domain" else {}
    return CopyRing(tuple(order), tuple(known.get(node, "") for node in order), copies)


def replicas_lost(nodes: tuple[str, ...], gone: Collection[str], shards: int) -> bool:
    """Return whether a part of the state is on no device any more. Each of ``shards`` workers in a row holds a part of it, and
    the next as many hold the same again; with 1 (DDP) each worker holds all.

    >>> replicas_lost(("a", "b", "c", "d"), {"a", "b"}, shards=2), replicas_lost(("a", "b", "c", "d"), {"a", "c"}, shards=2)
    (False, True)
    """
    left = {rank % shards for rank, node in enumerate(nodes) if node not in gone}
    return len(left) < shards
