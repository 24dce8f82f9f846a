"""Find what the survivors of a lost worker group still hold: which of them together have the newest whole state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class LiveShard(NamedTuple):
    """What a rank still has in its own memory: its shard of the state after a whole step."""

    rank: int
    step: int
    """Steps done."""
    shard: int
    """Which shard of the state."""
    num_shards: int
    """Shards of the whole state; each copy of the model has all of them."""


def newest_holders(offers: Iterable[LiveShard]) -> tuple[int, ...]:
    """Return the ranks that hold the newest whole state, ascending: those that offer the newest step of which every shard is
    offered. Returns an empty tuple if there is no such step. A rank may be a step ahead of another, because the all-reduce of
    the step in which a group fails ends on some ranks only.

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
    """Return whether these are all shards.

    Examples:
        >>> covers([1, 0, 1], 2), covers([1, 1], 2)
        (True, False)
    """
    return set(shards) == set(range(num_shards))


def replicas_lost(nodes: Sequence[str], gone: Collection[str], num_shards: int) -> bool:
    """Return whether the ranks that survive lack a shard of the state.

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
