"""What the survivors of a lost worker group still hold: which of them together have the newest whole state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
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


def newest_whole(offers: Iterable[LiveShard]) -> tuple[int, ...]:
    """Return the ranks, ascending, of the newest step of which the ranks that ``offers`` come from have every shard; empty if
    there is none. A rank may be a step ahead of another: the all-reduce of the step in which a group fails ends on some ranks
    only.

    Examples:
        >>> newest_whole([LiveShard(1, 7, 1, 2), LiveShard(2, 7, 0, 2), LiveShard(3, 8, 1, 2)])
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
