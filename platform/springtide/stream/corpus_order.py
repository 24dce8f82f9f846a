"""Map draws to rows. Draw n of a corpus is the n-th time that training takes a row from it; here its row number is computed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from springtide.storage.digest import mix

_EPOCHS_KEPT = 2
"""Number of epochs per corpus whose order of row groups is kept in memory."""


class CorpusOrders:
    """Rows of several corpora in the order in which training draws them, epoch after epoch. The order of row groups of the
    latest epochs is cached.

    Symbols are those of ``springtide.stream.order``; arrays are int64, one element per draw.
    """

    def __init__(self, seed: int, group_rows: Sequence[Sequence[int] | np.ndarray], lanes: int, window: int) -> None:
        """Divide each corpus into columns: parts whose rows are read one window (a few rows shuffled together) after another.

        Args:
            seed: seed of the order.
            group_rows: for each corpus, the number of rows of every row group in the order of the manifest, at least 1 each.
            lanes: number of lanes (equal parts of a batch), C.
            window: rows of a window, w [rows].
        """
        self._seed, self._window = seed, window
        self._sizes = [np.asarray(rows) for rows in group_rows]
        self.rows = np.array([sizes.sum(dtype=np.int64) for sizes in self._sizes], dtype=np.int64)
        """Number of rows of each corpus, T."""
        self.columns = np.clip(self.rows // window, 1, lanes)
        """Number of columns of each corpus, S. A column is a part of the corpus whose rows are drawn one after another."""
        self._spread = np.array([spread(columns) for columns in self.columns.tolist()], dtype=np.int64)
        self._starts = functools.lru_cache(maxsize=len(self._sizes))(self._first_rows)
        self._groups = functools.lru_cache(maxsize=_EPOCHS_KEPT * len(self._sizes))(self._permute_groups)

    def places(self, corpora: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return sort keys that spread a step's draws over its lanes (equal parts of a batch): float64 in [0, 1), one per draw.
        Draws from the same column have the same key. A column is a part of the corpus whose rows are drawn one after
        another."""
        columns = self.columns[corpora]
        column = draws % self.rows[corpora] % columns
        return column * self._spread[corpora] % columns / columns

    def draw(self, corpora: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """For each draw, return the number of the drawn row within its corpus, int64 (n,). ``draws``: number of each draw,
        counted from 0 for each corpus."""
        rows, columns, window = self.rows[corpora], self.columns[corpora], self._window
        epoch, place = np.divmod(draws, rows)
        inside, column = np.divmod(place, columns)
        length = rows // columns + (column < rows % columns)
        start = column * (rows // columns) + np.minimum(column, rows % columns)
        # let columns begin new windows at different steps: otherwise all columns would open new row groups in the same step
        phase = column * window // columns
        number = (inside + phase) // window
        begin = np.maximum(number * window - phase, 0)
        end = np.minimum((number + 1) * window - phase, length)
        key = keys(self._seed, corpora, epoch, column + 1, number)
        return self._stored(corpora, epoch, start + begin + permuted(key, inside - begin, end - begin))

    def _stored(self, corpora: np.ndarray, epochs: np.ndarray, virtual: np.ndarray) -> np.ndarray:
        """Return the row numbers, as stored on disk, at the positions ``virtual`` of an epoch's virtual sequence. The virtual
        sequence is the corpus with its row groups permuted."""
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
        """Return the number of the first row of every row group of ``corpus``, int64 (groups,)."""
        sizes = self._sizes[corpus]
        return np.cumsum(sizes, dtype=np.int64) - sizes

    def _permute_groups(self, corpus: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the row groups of ``corpus`` in the order of ``epoch``, int32 or int64 (groups,), and the end position of each
        row group in the virtual sequence (the corpus with its row groups permuted), int64 (groups,)."""
        sizes = self._sizes[corpus]
        groups = permutation(keys(self._seed, corpus, epoch), len(sizes))
        groups = groups.astype(np.int32) if len(sizes) < 2**31 else groups  # int32 halves the memory of the order
        return groups, np.cumsum(sizes[groups], dtype=np.int64)


# Pseudo-random permutations that a key determines. They are computed when needed and not stored. They are equal on every
# machine and with every version of numpy.

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6


def keys(*parts: int | np.ndarray) -> np.ndarray:
    """Return 64-bit keys, uint64 (n,) or (1,), hashed from several non-negative integers or arrays of integers. The order of
    the integers matters."""
    state: np.ndarray = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = mix(state ^ np.asarray(part).astype(np.uint64))
    return state


def permutation(key: np.ndarray, size: int) -> np.ndarray:
    """Return a permutation of range(size), int64, that ``key`` determines: the numbers sorted by their keyed hash."""
    numbers = np.arange(size, dtype=np.uint64)
    return np.argsort(mix(numbers * _GOLDEN + key), kind="stable")


def permuted(key: np.ndarray, places: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Apply a keyed permutation of range(size) to each of ``places``, each with its own key and size; return int64 (n,).

    A Feistel network over pairs of digits in base ceil(sqrt(size)): it permutes a range slightly larger than range(size). A
    result outside range(size) is permuted again until it is inside (cycle walking).

    Args:
        key: uint64 (n,).
        places: int64 (n,), each below its size.
        sizes: int64 (n,).

    Source:
        Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002: generalised Feistel and cycle walking.
    """
    found = places.astype(np.uint64)
    sizes = sizes.astype(np.uint64)
    base = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64)  # float64 is exact for sizes up to 2**52
    outside = np.arange(len(found))
    while len(outside):
        here, side, of = found[outside], base[outside], key[outside]
        left, right = here // side, here % side
        for number in range(_ROUNDS):
            left, right = right, (left + mix(right * _GOLDEN + of + np.uint64(number))) % side
        found[outside] = left * side + right
        outside = outside[found[outside] >= sizes[outside]]
    return found.astype(np.int64)


def spread(size: int) -> int:
    """Return a factor f that spreads consecutive numbers: i -> i * f mod size permutes range(size) and puts neighbours far
    apart. f is the first number from ``size`` * 0.618 (golden section) on that has no divisor in common with ``size``."""
    golden = round(size * (5**0.5 - 1) / 2)
    return next(f for f in range(max(golden, 1), 2 * size + 2) if math.gcd(f, size) == 1)
