"""Decide whether a node is fit to train: before it joins, compare its device and network speeds with the other nodes'
speeds."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEAST_SHARE = 0.4
"""Minimum device speed of a node, as a share of the other nodes' median. A slower node would hold up all others."""

LEAST_NETWORK_SHARE = 0.1
"""Minimum network speed of a node, as a share of the other nodes' median. It is lower than the limit for devices because
network speed varies more."""
SLOW_SHARE = 0.6
"""A rank is reported as slow if its speed during training is below this share of the other ranks' median."""


class Health(NamedTuple):
    """Result of the check of a node's device, which is done before the node joins."""

    flops_per_s: float
    copy_bytes_per_s: float
    wrong: str = ""
    """Description of the fault that makes the node unfit to train; empty if there is none."""
    network_bytes_per_s: float = 0.0
    """Speed from the driver's node to this node; 0 if nothing was sent."""
    remark: str = ""
    """Problem that the user should fix although the node may train; empty if there is none."""


_CHECKS = (
    ("flops_per_s", "its device multiplies", LEAST_SHARE),
    ("copy_bytes_per_s", "its device copies", LEAST_SHARE),
    ("network_bytes_per_s", "the network reaches it", LEAST_NETWORK_SHARE),
)


class HealthTable:
    """Measured speeds of all checked nodes, with which a new node is compared. Speeds are kept sorted to find a median fast."""

    def __init__(self, known: Mapping[str, Health]) -> None:
        self._known = dict(known)
        good = [health for health in known.values() if not health.wrong]
        self._speeds = {field: sorted(filter(None, (getattr(one, field) for one in good))) for field, *_ in _CHECKS}

    def add(self, node: str, health: Health) -> None:
        """Record the health of a node, in place of an earlier record of the same node."""
        before = self._known.get(node)
        for field, speeds in self._speeds.items():
            if before is not None and not before.wrong and getattr(before, field):
                del speeds[bisect.bisect_left(speeds, getattr(before, field))]
            if not health.wrong and getattr(health, field):
                bisect.insort(speeds, getattr(health, field))
        self._known[node] = health

    def unfit(self, node: str, mine: Health) -> str:
        """Return why ``node``, whose health is ``mine``, is unfit to train with the other nodes; empty if it is fit."""
        if mine.wrong:
            return f"its device {mine.wrong}"
        before = self._known.get(node)
        for field, what, least in _CHECKS:
            here, speeds = getattr(mine, field), self._speeds[field]
            # leave out the node's own earlier record: compare it with other nodes only
            is_among = before is not None and not before.wrong and bool(getattr(before, field))
            median = _median_of_others(speeds, bisect.bisect_left(speeds, getattr(before, field)) if is_among else None)
            if 0 < here < least * median:
                return f"{what} at {here / median:.0%} of the others' speed"
        return ""


def slow(speeds: Sequence[float], below: float = SLOW_SHARE) -> dict[int, float]:
    """Return slow rank -> its speed as a share of the median speed of the other ranks. Speeds are sorted once, because this
    runs within a step, for a thousand ranks.

    Args:
        speeds: speed of each rank, in any unit.
        below: share of the median below which a rank is slow.

    >>> slow([100.0, 90.0, 110.0, 50.0])
    {3: 0.5}
    """
    order = sorted(range(len(speeds)), key=speeds.__getitem__)
    ascending = [speeds[rank] for rank in order]
    shares = {rank: speeds[rank] / _median_of_others(ascending, place) for place, rank in enumerate(order)}
    return {rank: shares[rank] for rank in sorted(shares) if shares[rank] < below}


def _median_of_others(ascending: Sequence[float], left_out: int | None) -> float:
    """Return the median of sorted numbers, without the number at index ``left_out`` (None: use all); 0 if no number is left."""
    number = len(ascending) - (left_out is not None)
    if not number:
        return 0.0

    def at(place: int) -> float:
        return ascending[place + (left_out is not None and place >= left_out)]

    return at(number // 2) if number % 2 else (at(number // 2 - 1) + at(number // 2)) / 2
