"""Find devices that compute wrong results: several ranks compute the same micro-batch, and their results are compared.

    round 1   each rank computes again what the next rank computed in the step       all agree: done
    round 2   two more results for each: with three ranks or more, the rank's own once more and one by a third rank;
              with two, everything once more

A rank is named if it contradicts itself, or if two of three ranks contradict it. If two ranks disagree and each repeats its
own result, neither can be named.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

TOLERANCES = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.02, "fp8": 0.1, "fp8_rowwise": 0.1}
"""Precision -> largest difference that rounding can make between two results, as a share of the loss or of the gradient's norm
[ratio]."""
COST_SHARE = 0.01
"""Largest share of the time that checks may take when they are made earlier than ``every_s`` [ratio]."""


class MicroBatchResult(NamedTuple):
    """What a rank computed of a micro-batch, in a few numbers."""

    nats: float
    """Summed loss."""
    norm: float
    """Norm of the gradient at the embedding's output; likewise the next field."""
    projections: tuple[float, ...]
    """Sums of its elements under random signs: if one element changes, each changes as much."""
    digest: int
    """64 bits over the bits of the loss and of all elements."""
    device: int = 0
    """The kind of device that computed it."""


class Verdict(NamedTuple):
    """The outcome of a comparison."""

    disputed: tuple[int, ...] = ()
    """Ranks whose micro-batch has different results; empty if all agree."""
    wrong: Mapping[int, str] = {}
    """Rank -> why it is named; empty if nobody can be."""
    is_random: bool = False
    """Whether every rank contradicts itself. Then the model draws random numbers of its own, and the devices may be right."""


def shifts(num_ranks: int) -> tuple[int, int]:
    """Return whose micro-batch each rank computes in round 2, as distances to its own rank."""
    return (0, 1) if num_ranks == 2 else (0, 2)


def agree(one: MicroBatchResult, other: MicroBatchResult, exact: bool, tolerance: float) -> bool:
    """Return whether two results are the same: bit for bit, if ``exact`` and both devices are of a kind, else within
    ``tolerance``, as in ``TOLERANCES``.

    >>> right = MicroBatchResult(700.0, 2.0, (0.5, -1.0), digest=1)
    >>> rounded = right._replace(projections=(0.5005, -1.0), digest=2)
    >>> agree(right, rounded, exact=False, tolerance=1e-3), agree(right, rounded, exact=True, tolerance=1e-3)
    (True, False)
    """
    if one.digest == other.digest:
        return True
    if exact and one.device == other.device:
        return False
    limit = tolerance * min(one.norm, other.norm)
    pairs = [(one.norm, other.norm), *zip(one.projections, other.projections, strict=True)]
    return _near(one.nats, other.nats, tolerance * min(abs(one.nats), abs(other.nats))) and all(
        _near(mine, yours, limit) for mine, yours in pairs
    )


def _near(one: float, other: float, limit: float) -> bool:
    both_overflow = not math.isfinite(one) and not math.isfinite(other)
    return both_overflow or one == other or abs(one - other) <= limit


def judge(
    results: Mapping[int, Sequence[tuple[int, MicroBatchResult]]], num_ranks: int, exact: bool, tolerance: float
) -> Verdict:
    """Compare results. ``results``: the rank whose micro-batch it is -> each rank that computed it, and its result."""

    def same(one: tuple[int, MicroBatchResult], other: tuple[int, MicroBatchResult]) -> bool:
        return agree(one[1], other[1], exact, tolerance)

    disputed: list[int] = []
    contradicting: set[int] = set()
    outvoted: dict[int, str] = {}
    for owner, computed in results.items():
        different = [(one, other) for one, other in itertools.combinations(computed, 2) if not same(one, other)]
        if not different:
            continue
        disputed.append(owner)
        contradicting |= {one[0] for one, other in different if one[0] == other[0]}
        by_rank = dict(reversed(computed))  # the first result of each
        if len(by_rank) < 3:
            continue
        votes = {rank: sum(same((rank, mine), one) for one in by_rank.items()) for rank, mine in by_rank.items()}
        if 2 * max(votes.values()) > len(by_rank):
            for rank, agreeing in votes.items():
                if 2 * agreeing <= len(by_rank):
                    outvoted[rank] = (
                        f"{max(votes.values())} of {len(by_rank)} ranks agree on a result, and it has another"
                    )
    wrong = outvoted | dict.fromkeys(contradicting, "it computes the same micro-batch twice with different results")
    named = dict(sorted(wrong.items())) if 2 * len(wrong) <= num_ranks else {}
    return Verdict(tuple(disputed), named, len(contradicting) == num_ranks)


def is_due(since_s: float, every_s: float, cost_s: float, wanted: bool) -> bool:
    """Return whether to check ``since_s`` after the last check, which took ``cost_s``. ``wanted``: there is a reason to check
    before ``every_s`` have passed, as often as ``COST_SHARE`` allows.

    >>> [is_due(since_s, 60.0, 0.1, wanted) for since_s, wanted in ((61.0, False), (11.0, False), (11.0, True), (9.0, True))]
    [True, False, True, False]
    """
    return since_s >= (min(every_s, cost_s / COST_SHARE) if wanted else every_s)
