"""Whether a node is fit to train: what its process found of its device before it joined, beside what the others' did."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEAST_SHARE = 0.4
"""Of the median of the nodes that are known: a slower one would hold up all the others."""

LEAST_NETWORK_SHARE = 0.1
"""Likewise; what a network gives a node wavers more than what it has of its own."""
SLOW_SHARE = 0.6
"""Of the median of the others, while all train: a slower one is worth a word."""


class Health(NamedTuple):
    """Of one device."""

    flops_per_s: float
    copy_bytes_per_s: float
    wrong: str = ""
    """What it does wrong."""
    network_bytes_per_s: float = 0.0
    """From the driver's node to this one; 0 where nothing was sent."""


def unfit(node: str, known: Mapping[str, Health]) -> str:
    """Why ``node`` is not to be trained with, in words; empty when it is. ``known`` has it and the others."""
    mine = known[node]
    others = [health for name, health in known.items() if name != node and not health.wrong]
    if mine.wrong:
        return f"its device {mine.wrong}"
    if not others:
        return ""
    for what, least, speeds in (
        ("its device multiplies", LEAST_SHARE, [one.flops_per_s for one in (mine, *others)]),
        ("its device copies", LEAST_SHARE, [one.copy_bytes_per_s for one in (mine, *others)]),
        ("the network reaches it", LEAST_NETWORK_SHARE, [one.network_bytes_per_s for one in (mine, *others)]),
    ):
        here, median = speeds[0], statistics.median([speed for speed in speeds[1:] if speed] or [0.0])
        if 0 < here < least * median:
            return f"{what} at {here / median:.0%} of the others' speed"
    return ""


def slow(speeds: Sequence[float]) -> dict[int, float]:
    """Rank -> its share of the median speed of the others, of those that hold them up; ``speeds`` by rank, in any unit."""
    shares = {
        rank: speed / statistics.median([*speeds[:rank], *speeds[rank + 1 :]]) for rank, speed in enumerate(speeds)
    }
    return {rank: share for rank, share in shares.items() if share < SLOW_SHARE}
