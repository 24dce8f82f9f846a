"""Choose the save interval: short enough that a loss costs little, long enough that saving does."""

from __future__ import annotations

import math
from typing import NamedTuple


class SaveInterval(NamedTuple):
    """A save interval, and why."""

    every_s: float
    """Training time between the starts of two saves [s]."""
    reason: str


def mean_time_to_loss(expected_s: float, observed_s: float, losses: int) -> float:
    """Return the mean training time between losses of workers [s]. What was expected counts as one loss that was seen, so
    that the first hours of a run do not decide alone. (This is a Gamma prior of shape 1 over the rate of a Poisson
    process.)"""
    return (expected_s + observed_s) / (1 + losses)


def young_daly_interval(save_s: float, loss_s: float, least_s: float, most_s: float) -> SaveInterval:
    """Return the best save interval within [least_s, most_s]. ``save_s``: training time that a save costs; ``loss_s``:
    mean training time to a loss; all [s].

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS, 2006), equation
    37; its first term is J. W. Young's sqrt(2 C M) (CACM, 1974).
    """
    if save_s >= 2 * loss_s:
        best = loss_s
    else:
        ratio = save_s / (2 * loss_s)
        best = math.sqrt(2 * save_s * loss_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
    every = min(max(best, least_s), most_s)
    bound = f", bounded to {every:.0f} s" if every != best else ""
    return SaveInterval(
        every, f"a save costs {save_s:.2f} s, a loss comes every {loss_s / 3600:.2f} h: best {best:.0f} s{bound}"
    )


def snapshot_every(copy_s: float, step_s: float, share: float, now: int = 0) -> int:
    """Return the steps between snapshots in memory, each of which costs training ``copy_s`` [s], so that they take at
    most ``share`` of it. The current value ``now`` stays while it is about right: measurements vary."""
    if now and share / 3 <= copy_s / (now * step_s) <= share * 1.3:
        return now
    return max(1, math.ceil(copy_s / (share * step_s)))
