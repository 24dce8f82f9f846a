"""Which corpus each slot of a step draws from, and how often a slot drew from each corpus before.

The cumulative weights cut the unit interval into one interval per corpus. Slot j of step s is the point
(j / G + s * a) mod 1. The G points of a step are evenly spaced, so every step holds its share of each corpus to within one
sample; a is the golden ratio, so over the steps every slot does too. All of it is integer arithmetic modulo M = G * 2**40:
counts over any range of steps are floor sums, exact and logarithmic in the step.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools

import numpy as np

from springtide.config.steps import OrderStep

_FINENESS = 2**40
_GOLDEN_RATIO = (5**0.5 - 1) / 2

WeightTable = tuple[tuple[int, tuple[float, ...]], ...]
"""(from_step, weights) in increasing order of steps; the first is from step 0."""


@dataclasses.dataclass(frozen=True)
class MixtureSchedule:
    """Assignment of corpora to the ``slots`` slots of each step, by weights that may change over the steps."""

    slots: int
    schedule: WeightTable

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.schedule]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"a schedule begins at step 0 and its steps increase: {starts}")
        for start, weights in self.schedule:
            if len(weights) != self.num_corpora or min(weights) < 0 or sum(weights) <= 0:
                raise ValueError(
                    f"weights from step {start} must be {self.num_corpora} shares, not all zero: {weights}"
                )

    @property
    def num_corpora(self) -> int:
        return len(self.schedule[0][1])

    @functools.cached_property
    def _modulus(self) -> int:
        return self.slots * _FINENESS

    @functools.cached_property
    def _stride(self) -> int:
        return int(_GOLDEN_RATIO * self._modulus) | 1

    @functools.cached_property
    def _cuts(self) -> list[np.ndarray]:
        """Upper bound of every corpus's interval, int64 (corpora,), for each piece of the schedule."""
        cuts = []
        for _, weights in self.schedule:
            shares = np.cumsum(weights) / np.sum(weights)
            bounds = np.array([int(share * self._modulus) for share in shares], dtype=np.int64)
            bounds[np.flatnonzero(weights)[-1] :] = self._modulus
            cuts.append(bounds)
        return cuts

    def shares(self, piece: int) -> list[tuple[int, int]]:
        """Return (corpus, upper bound of its interval) of the corpora with a share in this piece of the schedule."""
        cuts = self._cuts[piece].tolist()
        return [(corpus, cut) for corpus, cut in enumerate(cuts) if cut > (cuts[corpus - 1] if corpus else 0)]

    def corpora(self, step: OrderStep) -> np.ndarray:
        """Return the corpus of every slot of ``step``, int64 (slots,)."""
        shift = (step * self._stride) % self._modulus
        points = (np.arange(self.slots, dtype=np.int64) * _FINENESS + shift) % self._modulus
        piece = bisect.bisect_right([start for start, _ in self.schedule], step) - 1
        return np.searchsorted(self._cuts[piece], points, side="right")

    def count_before(self, slot: int, step: OrderStep) -> list[int]:
        """Return how often ``slot`` drew from each corpus in the steps before ``step``."""
        if self.num_corpora == 1:
            return [step]
        counts = [0] * self.num_corpora
        starts = [start for start, _ in self.schedule]
        for cuts, begin, end in zip(self._cuts, starts, [*starts[1:], step], strict=True):
            steps = min(end, step) - begin
            if steps <= 0:
                continue
            first = (slot * _FINENESS + begin * self._stride) % self._modulus
            below = [_count_below(steps, self._stride, first, self._modulus, int(cut)) for cut in cuts]
            for corpus in range(self.num_corpora):
                counts[corpus] += below[corpus] - (below[corpus - 1] if corpus else 0)
        return counts


def _count_below(n: int, a: int, b: int, m: int, cut: int) -> int:
    """Return #{0 <= i < n : (a i + b) mod m < cut}, for 0 <= cut <= m."""
    # floor(x / m) - floor((x - cut) / m) is one exactly when x mod m < cut
    return floor_sum(n, a, b, m) - floor_sum(n, a, b - cut, m)


def floor_sum(n: int, a: int, b: int, m: int) -> int:
    """Return the sum of floor((a i + b) / m) over 0 <= i < n, for a >= 0 and any b; O(log m), by the Euclidean algorithm
    on lattice points (Graham, Knuth, Patashnik, Concrete Mathematics, 3.5)."""
    total = n * (b // m)
    b %= m
    while n > 0:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            break
        # swap the axes: count the lattice points by columns of the other one
        n, b, a, m = top // m, top % m, m, a
    return total
