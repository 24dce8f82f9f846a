"""Table of a cluster's live nodes, with the totals that ``policy.decide`` needs. Changing a node takes O(1) time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """A live node of the cluster."""

    id: str
    places: int
    """Number of workers that fit on the node."""
    leaves_at: float | None = None
    """When the node will be taken away; None if no notice of its loss has come [s]."""
    problem: str = ""
    """Why the node must not be used; empty if it may be used."""
    ready: int | None = None
    """Number of ready worker processes on the node; None: as many as its ``places``."""

    @property
    def standing(self) -> int:
        """Number of ready worker processes on the node, at most ``places``."""
        return self.places if self.ready is None else min(self.places, self.ready)

    @property
    def is_usable(self) -> bool:
        """Whether the node has no notice of its loss, no problem, and room for workers."""
        return self.leaves_at is None and not self.problem and self.places > 0


class NodeTable:
    """The live nodes of a cluster by id, with totals over the usable nodes.

    >>> table = NodeTable([Node("a", 2), Node("b", 1, leaves_at=9.0)])
    >>> table.places, list(table.leaving)
    (2, ['b'])
    >>> table.set(Node("c", 1, ready=0))
    >>> table.remove("b")
    >>> table.places, table.standing, list(table.leaving), [node.id for node in table.usable]
    (3, 2, [], ['a', 'c'])
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.by_id = {node.id: node for node in nodes}
        usable = [
            node for node in self.by_id.values() if node.leaves_at is None and not node.problem and node.places > 0
        ]
        self.usable_places = {node.id: node.places for node in usable}
        """Usable node -> number of workers that fit on it."""
        self.places = sum(self.usable_places.values())
        self.standing = self.places - sum([node.places - node.standing for node in usable if node.ready is not None])
        """Number of ready worker processes on all usable nodes."""
        self.leaving = {node.id: node for node in self.by_id.values() if node.leaves_at is not None}
        self.unfit = {node.id: node for node in self.by_id.values() if node.problem}
        """The nodes that must not be used because of a problem, by id."""
        self.key = 0
        """Hash of the usable nodes and of the numbers of workers that fit on them; it does not depend on their order."""
        for item in self.usable_places.items():
            self.key ^= hash(item)

    @property
    def usable(self) -> list[Node]:
        """The nodes without a notice of their loss and without a problem, with room for workers (``Node.is_usable``)."""
        return [self.by_id[name] for name in self.usable_places]

    def set(self, node: Node) -> None:
        """Add a node, or replace the node with the same id."""
        if node.id in self.by_id:
            self._count(self.by_id[node.id], -1)
        self.by_id[node.id] = node
        self._count(node, 1)

    def remove(self, id: str) -> None:
        """Remove the node ``id``; do nothing if it is not in the table."""
        if node := self.by_id.pop(id, None):
            self._count(node, -1)

    def _count(self, node: Node, sign: int) -> None:
        if node.is_usable:
            self.places += sign * node.places
            self.standing += sign * node.standing
            self.key ^= hash((node.id, node.places))
            if sign > 0:
                self.usable_places[node.id] = node.places
            else:
                del self.usable_places[node.id]
        for kind, belongs in ((self.leaving, node.leaves_at is not None), (self.unfit, bool(node.problem))):
            if belongs and sign > 0:
                kind[node.id] = node
            elif belongs:
                del kind[node.id]


# Keep the workers that share a copy of the model on one node. They all-gather the weights of every block, which is slow between
# nodes.

_LEAST_SHARE = 0.5


def within_nodes(nodes: Sequence[Node], cell: int, least: int = 1) -> list[Node]:
    """Return ``nodes`` with the numbers of workers that fit and of ready processes rounded down to multiples of ``cell``. Then
    no cell (the workers that share a copy of the model) spans two nodes. If less than half of the room, or fewer than ``least``
    workers, would be left, return ``nodes`` unchanged: cells may then span nodes.

    Args:
        nodes: the live nodes.
        cell: number of workers that share a copy of the model; at most 1: nothing is rounded.
        least: fewest workers to train with.

    Examples:
        >>> [node.places for node in within_nodes([Node("a", 8), Node("b", 7), Node("c", 8)], 4)]
        [8, 4, 8]
        >>> [node.places for node in within_nodes([Node("a", 4), Node("b", 4)], 8)]
        [4, 4]
    """
    if cell <= 1:
        return list(nodes)
    whole = [
        node._replace(
            places=node.places // cell * cell, ready=None if node.ready is None else node.ready // cell * cell
        )
        for node in nodes
    ]
    left, places = (sum(node.places for node in some if node.is_usable) for some in (whole, nodes))
    return whole if left >= max(least, _LEAST_SHARE * places) else list(nodes)
