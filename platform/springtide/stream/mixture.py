"""The corpus that each slot (place for a row) of a step draws from, and the number of draws from each corpus before a step.

The cumulative weights cut the unit interval into one interval per corpus. Slot j of step s has the point (f j / G + s a) mod 1
and draws from the corpus whose interval contains this point. G is the number of slots of a step. The G points of a step are
evenly spaced, so in every step each corpus gets its share to within one row. a is the golden ratio, so over many steps each
slot also draws from each corpus by its share. f has no divisor in common with G and spreads the slots of a corpus over the
lanes (equal parts of a batch). All of this is integer arithmetic modulo M = G * 2**40. So the draws in any range of steps are
counted exactly by floor sums, in time logarithmic in the number of steps.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from springtide.config.steps import OrderStep
from springtide.stream.corpus_order import spread

_FINENESS = 2**40
_GOLDEN_RATIO = (5**0.5 - 1) / 2

WeightTable = tuple[tuple[int, tuple[float, ...]], ...]
"""Weights of the corpora: (first step, one weight per corpus) in increasing order of steps. The first entry is from step 0."""


@dataclasses.dataclass(frozen=True)
class MixtureSchedule:
    """Assigns a corpus to each of the ``slots`` slots (places for a row) of a step, by weights that may change over the
    steps."""

    slots: int
    schedule: WeightTable

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.schedule]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"the steps of a mixture schedule must begin at 0 and increase: {starts}")
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
        """For each entry of the schedule, the upper bound of each corpus's interval, int64 (corpora,)."""
        cuts = []
        for _, weights in self.schedule:
            last = np.flatnonzero(weights)[-1]
            # sum up to the last corpus with a weight: zero weights after it would change the rounding of the sum, and so the
            # order
            shares = np.cumsum(weights[:last]) / np.sum(weights[: last + 1])
            bounds = np.full(len(weights), self._modulus, dtype=np.int64)
            bounds[:last] = [int(share * self._modulus) for share in shares]
            cuts.append(bounds)
        return cuts

    def shares(self, piece: int) -> list[tuple[int, int]]:
        """Return (corpus, upper bound of its interval) for each corpus with a weight above 0 in entry number ``piece`` of the
        schedule."""
        return self._shares[piece]

    @functools.cached_property
    def _shares(self) -> list[list[tuple[int, int]]]:
        found = []
        for cuts in self._cuts:
            shared = np.flatnonzero(np.diff(cuts, prepend=0) > 0)
            found.append(list(zip(shared.tolist(), cuts[shared].tolist(), strict=True)))
        return found

    def corpora(self, step: OrderStep) -> np.ndarray:
        """Return the corpus of every slot (place for a row) of ``step``, int64 (slots,)."""
        shift = (step * self._stride) % self._modulus
        points = (self._spaced + shift) % self._modulus
        piece = bisect.bisect_right(self.schedule, int(step), key=lambda entry: entry[0]) - 1
        return np.searchsorted(self._cuts[piece], points, side="right")

    def counts(self, first: OrderStep, last: OrderStep) -> np.ndarray:
        """Return how many slots (places for a row) draw from each corpus in the steps [first, last), int64 (corpora,)."""
        counts = [0] * self.num_corpora
        starts = [start for start, _ in self.schedule]
        for piece, (start, end) in enumerate(zip(starts, [*starts[1:], last], strict=True)):
            begin, steps = max(start, first), min(end, last) - max(start, first)
            if steps > 0:
                corpora, cuts = zip(*self.shares(piece), strict=True)
                below = [0, *self._counts_below(cuts, begin, steps)]
                for corpus, (lower, upper) in zip(corpora, itertools.pairwise(below), strict=True):
                    counts[corpus] += upper - lower
        return np.array(counts, dtype=np.int64)

    def _counts_below(self, cuts: Iterable[int], first: int, steps: int) -> Iterator[int]:
        """Count points below a bound, for each bound in ``cuts``: yield how many slot points of the ``steps`` steps from
        ``first`` on lie below it."""
        stride = self._stride % _FINENESS
        shift = first * stride % _FINENESS
        whole = floor_sum(steps, stride, shift, _FINENESS)
        for cut in cuts:
            # A step's points are p * 2**40 + r, for p from 0 to G - 1, with one r per step. Below the cut lie ``every`` points
            # of each step, and one more in steps with r < rest. These steps are counted by floor sums:
            # floor(x / m) - floor((x - rest) / m) is 1 exactly when x mod m < rest.
            every, rest = divmod(cut, _FINENESS)
            more = whole - floor_sum(steps, stride, shift - rest, _FINENESS) if rest else 0
            yield every * steps + more

    @functools.cached_property
    def _spaced(self) -> np.ndarray:
        """The points of the slots in step 0, int64 (slots,). In step s the points are shifted by s * ``_stride``."""
        return np.arange(self.slots, dtype=np.int64) * spread(self.slots) % self.slots * _FINENESS


def floor_sum(n: int, a: int, b: int, m: int) -> int:
    """Return the sum of floor((a i + b) / m) over 0 <= i < n, for a >= 0 and any b. Takes O(log m) time, by the Euclidean
    algorithm on lattice points (Graham, Knuth, Patashnik, Concrete Mathematics, 3.5)."""
    total = n * (b // m)
    b %= m
    while n > 0:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            break
        # swap the axes: count the same lattice points along the other axis
        n, b, a, m = top // m, top % m, m, a
    return total
