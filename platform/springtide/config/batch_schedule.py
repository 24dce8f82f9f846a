"""How many rows each step of the order has: fewer in the beginning, where that is wanted, then as many to the end."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Ramp:
    """``pieces``: (from_step, rows) in rising order of steps; the first is from step 0, the last never ends."""

    pieces: tuple[tuple[int, int], ...]

    def piece(self, step: int) -> int:
        """The number of the piece that ``step`` is in."""
        return bisect.bisect_right(self.pieces, step, key=lambda piece: piece[0]) - 1

    def rows(self, step: int) -> int:
        """Of ``step``."""
        return self.pieces[self.piece(step)][1]

    def before(self, step: int) -> int:
        """Rows of all the steps before ``step``."""
        return sum((end - begin) * self.pieces[piece][1] for piece, begin, end in self.runs(0, step))

    def steps(self, rows: int) -> int:
        """The fewest steps that have ``rows`` rows or more."""
        starts = [start for start, _ in self.pieces]
        for (start, size), end in zip(self.pieces, [*starts[1:], None], strict=True):
            needed = start + -(-rows // size)
            if end is None or needed <= end:
                return needed
            rows -= (end - start) * size
        raise AssertionError("the last piece never ends")

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """The steps [first, last) as (piece, begin, end)."""
        ends = [start for start, _ in self.pieces[1:]] + [last]
        for piece, ((start, _), end) in enumerate(zip(self.pieces, ends, strict=True)):
            begin, end = max(first, start), min(last, end)
            if begin < end:
                yield piece, begin, end
