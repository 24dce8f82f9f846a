"""The row that each draw from a corpus takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from springtide.stream.permute import keys, permutation, permuted, spread

_EPOCHS_KEPT = 2
"""Per corpus."""


class CorpusOrders:
    """The rows of several corpora in the order of their draws, epoch after epoch; it remembers the latest orders of row groups.

    Symbols are those of ``springtide.stream.order``; arrays are int64, one element per draw.
    """

    def __init__(self, seed: int, group_rows: Sequence[Sequence[int] | np.ndarray], lanes: int, window: int) -> None:
        """Lay out the columns.

        Args:
            seed: of the order.
            group_rows: rows of every row group, in the order of the manifest, of each corpus, at least one row each.
            lanes: C.
            window: w [rows].
        """
        self._seed, self._window = seed, window
        self._sizes = [np.asarray(rows) for rows in group_rows]
        self.rows = np.array([sizes.sum(dtype=np.int64) for sizes in self._sizes], dtype=np.int64)
        """T of each corpus."""
        self.columns = np.clip(self.rows // window, 1, lanes)
        """S of each corpus."""
        self._spread = np.array([spread(columns) for columns in self.columns.tolist()], dtype=np.int64)
        self._starts = functools.lru_cache(maxsize=len(self._sizes))(self._first_rows)
        self._groups = functools.lru_cache(maxsize=_EPOCHS_KEPT * len(self._sizes))(self._permute_groups)

    def places(self, corpora: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return where among the lanes the column of each draw belongs, float64 in [0, 1)."""
        columns = self.columns[corpora]
        column = draws % self.rows[corpora] % columns
        return column * self._spread[corpora] % columns / columns

    def draw(self, corpora: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return the row of its corpus that each draw takes."""
        rows, columns, window = self.rows[corpora], self.columns[corpora], self._window
        epoch, place = np.divmod(draws, rows)
        inside, column = np.divmod(place, columns)
        length = rows // columns + (column < rows % columns)
        start = column * (rows // columns) + np.minimum(column, rows % columns)
        # columns begin their windows in turn: a step opens the row groups of few of them
        phase = column * window // columns
        number = (inside + phase) // window
        begin = np.maximum(number * window - phase, 0)
        end = np.minimum((number + 1) * window - phase, length)
        key = keys(self._seed, corpora, epoch, column + 1, number)
        return self._stored(corpora, epoch, start + begin + permuted(key, inside - begin, end - begin))

    def _stored(self, corpora: np.ndarray, epochs: np.ndarray, virtual: np.ndarray) -> np.ndarray:
        """Return the rows that stand at these places of the virtual sequences of their epochs."""
        rows = np.empty_like(virtual)
        order = np.lexsort((epochs, corpora))
        changes = np.flatnonzero(np.diff(corpora[order]) | np.diff(epochs[order])) + 1
        for here in np.split(order, changes) if len(order) else []:
            corpus = int(corpora[here[0]])
            groups, ends = self._groups(corpus, int(epochs[here[0]]))
            place = np.searchsorted(ends, virtual[here], side="right")
            group = groups[place]
            rows[here] = self._starts(corpus)[group] + virtual[here] - (ends[place] - self._sizes[corpus][group])
        return rows

    def _first_rows(self, corpus: int) -> np.ndarray:
        """Return the first row of every row group, int64 (groups,)."""
        sizes = self._sizes[corpus]
        return np.cumsum(sizes, dtype=np.int64) - sizes

    def _permute_groups(self, corpus: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the row groups in the order of the epoch, int32 or int64 (groups,), and where each ends in its virtual
        sequence, int64 (groups,)."""
        sizes = self._sizes[corpus]
        groups = permutation(keys(self._seed, corpus, epoch), len(sizes))
        groups = groups.astype(np.int32) if len(sizes) < 2**31 else groups  # half the memory of an epoch of many
        return groups, np.cumsum(sizes[groups], dtype=np.int64)
