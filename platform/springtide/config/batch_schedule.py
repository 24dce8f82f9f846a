"""The number of rows in each step of the order: optionally smaller batches first, then a constant size."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A piecewise constant batch size.

    ``pieces``: (from_step, rows) in rising order of steps; the first starts at step 0, the last never ends.
    """

    pieces: tuple[tuple[int, int], ...]

    def piece(self, step: int) -> int:
        """The index of the piece that contains ``step``."""
        return bisect.bisect_right(self.pieces, step, key=lambda piece: piece[0]) - 1

    def rows(self, step: int) -> int:
        """The number of rows in ``step``."""
        return self.pieces[self.piece(step)][1]

    def before(self, step: int) -> int:
        """The number of rows in all steps before ``step``."""
        return sum((end - begin) * self.pieces[piece][1] for piece, begin, end in self.runs(0, step))

    def steps(self, rows: int) -> int:
        """The smallest number of steps, from step 0, that together have at least ``rows`` rows."""
        starts = [start for start, _ in self.pieces]
        for (start, size), end in zip(self.pieces, [*starts[1:], None], strict=True):
            needed = start + -(-rows // size)
            if end is None or needed <= end:
                return needed
            rows -= (end - start) * size
        raise AssertionError("the last piece never ends")

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Split the steps [first, last) by piece: yield (piece, begin, end)."""
        ends = [start for start, _ in self.pieces[1:]] + [last]
        for piece, ((start, _), end) in enumerate(zip(self.pieces, ends, strict=True)):
            begin, end = max(first, start), min(last, end)
            if begin < end:
                yield piece, begin, end
