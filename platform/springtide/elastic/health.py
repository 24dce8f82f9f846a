"""Decide whether a node is fit to train: compare the device check of its process, before it joins, with the others'."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEAST_SHARE = 0.4
"""Least share of the median speed of the known nodes: a slower node would hold up all others."""

LEAST_NETWORK_SHARE = 0.1
"""The same for network speed, which varies more than a device's own speed."""
SLOW_SHARE = 0.6
"""Share of the others' median speed during training below which a rank is reported as slow."""


class Health(NamedTuple):
    """Result of one device's check."""

    flops_per_s: float
    copy_bytes_per_s: float
    wrong: str = ""
    """Description of the fault; empty without one."""
    network_bytes_per_s: float = 0.0
    """From the driver's node to this one; 0 if nothing was sent."""
    remark: str = ""
    """What its user should know and mend, though it may train; empty if there is nothing."""


def unfit(node: str, known: Mapping[str, Health]) -> str:
    """Return the reason why ``node`` is unfit to train; empty if it is fit. ``known``: its health and that of the others."""
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


def slow(speeds: Sequence[float], below: float = SLOW_SHARE) -> dict[int, float]:
    """Return the slow ranks -> their share of the median speed of the others.

    Args:
        speeds: by rank, in any unit.
        below: the share from which a rank is not slow.
    """
    shares = {
        rank: speed / statistics.median([*speeds[:rank], *speeds[rank + 1 :]]) for rank, speed in enumerate(speeds)
    }
    return {rank: share for rank, share in shares.items() if share < below}
