"""Keep the workers that share a copy of the model on one node: their every block is gathered from all of them."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.elastic.node_table import Node

_LEAST_SHARE = 0.5


def within_nodes(nodes: Sequence[Node], cell: int, least: int = 1) -> list[Node]:
    """Return ``nodes`` with places, and ready processes, for whole cells only, so that no cell spans two of them. Cells span
    nodes, and nothing is changed, if less than half of the places would be left, as where no node holds a whole cell, or
    fewer than ``least``.

    Args:
        nodes: the live nodes.
        cell: number of workers that share a copy of the model.
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
