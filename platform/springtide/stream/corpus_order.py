"""The order in which each lane draws the rows of one corpus."""

from __future__ import annotations

import functools

import numpy as np

from springtide.errors import CorpusError, explain
from springtide.stream.permute import key, permutation

_EPOCHS_KEPT = 4
_WINDOWS_KEPT = 4096


class CorpusOrder:
    """The rows of one corpus, lane by lane and epoch after epoch. It remembers the permutations that it used last.

    Symbols are those of ``springtide.stream.order``.
    """

    def __init__(
        self, seed: int, number: int, group_rows: tuple[int, ...], lanes: int, rows_per_step: int, window: int
    ) -> None:
        """Raises CorpusError if the corpus has fewer rows than a step.

        Args:
            seed: of the order.
            number: index of the corpus in the mixture.
            group_rows: rows of every row group, in the order of the manifest.
            lanes: C.
            rows_per_step: k of a step of full size.
            window: w [rows].
        """
        rows = sum(group_rows)
        self._seed, self._number, self._window = seed, number, window
        self._lane_rows = rows // lanes
        self.draws_per_epoch = self._lane_rows // rows_per_step * rows_per_step
        """Rows that a lane draws before it begins the next epoch: L, rounded down to whole steps."""
        if self.draws_per_epoch == 0:
            raise CorpusError(
                explain(
                    "stream.global_batch",
                    lanes * rows_per_step,
                    f"is more than the {rows} rows of the corpus",
                    "use a smaller batch, shorter sequences or more text",
                )
            )
        self._sizes = np.array(group_rows, dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._groups = functools.lru_cache(maxsize=_EPOCHS_KEPT)(self._permute_groups)
        self._shuffle = functools.lru_cache(maxsize=_WINDOWS_KEPT)(self._permute_window)

    def draw(self, lane: int, first: int, count: int) -> np.ndarray:
        """Return the rows of draws ``first`` to ``first + count - 1`` of ``lane``, int64 (count,)."""
        rows = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, offset = divmod(first + done, self.draws_per_epoch)
            window, inside = divmod(offset, self._window)
            shuffle = self._shuffle(epoch, lane, window)
            take = min(count - done, len(shuffle) - inside, self.draws_per_epoch - offset)
            virtual = lane * self._lane_rows + window * self._window + shuffle[inside : inside + take]
            rows[done : done + take] = self._stored(epoch, virtual)
            done += take
        return rows

    def _stored(self, epoch: int, virtual: np.ndarray) -> np.ndarray:
        """Return the rows of the corpus that stand at these places of the epoch's virtual sequence, int64 (n,)."""
        groups, ends = self._groups(epoch)
        place = np.searchsorted(ends, virtual, side="right")
        group = groups[place]
        return self._starts[group] + virtual - (ends[place] - self._sizes[group])

    def _permute_groups(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the row groups in the order of the epoch, and where each ends in its virtual sequence, int64 (groups,)."""
        groups = permutation(key(self._seed, self._number, epoch), len(self._sizes))
        return groups, np.cumsum(self._sizes[groups])

    def _permute_window(self, epoch: int, lane: int, window: int) -> np.ndarray:
        """Return the order of the rows within a window, int64 (at most w,)."""
        size = min(self._window, self._lane_rows - window * self._window)
        return permutation(key(self._seed, self._number, epoch, lane + 1, window), size)
