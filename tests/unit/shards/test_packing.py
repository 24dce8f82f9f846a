"""Documents fitted into rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from springtide.shards import best_fit, shuffle_rows


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(2, 20))
def test_no_document_that_fits_is_cut_and_every_token_is_predicted_once(lengths: list[int], capacity: int) -> None:
    pieces = best_fit(np.array(lengths), capacity)
    predicted: list[tuple[int, int]] = []
    for document, length in enumerate(lengths):
        mine = sorted(pieces[pieces[:, 1] == document, 2:].tolist())
        if length <= capacity:
            assert mine == [[0, length]]
        predicted += [(document, token) for begin, end in mine for token in range(begin + 1, end)]
    assert predicted == [(document, token) for document, length in enumerate(lengths) for token in range(1, length)]
    filled = np.bincount(pieces[:, 0], pieces[:, 3] - pieces[:, 2])
    assert filled.max() <= capacity
    assert filled.min() > 0
    assert (np.diff(pieces[:, 0]) >= 0).all()


@given(st.lists(st.integers(1, 15), min_size=1, max_size=60))
def test_no_two_rows_would_fit_into_one(lengths: list[int]) -> None:
    pieces = best_fit(np.array(lengths), 16)
    filled = np.sort(np.bincount(pieces[:, 0], pieces[:, 3] - pieces[:, 2]))
    assert len(filled) == 1 or filled[0] + filled[1] > 16


def test_shuffled_rows_hold_what_they_held_and_lengths_do_not_follow_each_other() -> None:
    """``best_fit`` opens rows longest document first, so neighbours in a shard were of one length."""
    lengths = np.random.default_rng(0).lognormal(4, 1.2, 4000).astype(int) + 2
    packed = best_fit(lengths, 256)
    pieces = shuffle_rows(packed, seed=3, shard=7)
    assert (np.diff(pieces[:, 0]) >= 0).all()
    assert rows_of(pieces) == rows_of(packed)
    assert pieces.tolist() == shuffle_rows(packed, seed=3, shard=7).tolist()
    assert pieces.tolist() != shuffle_rows(packed, seed=3, shard=8).tolist()
    assert neighbours(packed) > 0.9
    assert abs(neighbours(pieces)) < 0.1


def rows_of(pieces: np.ndarray) -> list[list[list[int]]]:
    """What each row holds, whatever its number."""
    return sorted(pieces[pieces[:, 0] == row, 1:].tolist() for row in np.unique(pieces[:, 0]))


def neighbours(pieces: np.ndarray) -> float:
    """Correlation of the documents that a row and the next one hold."""
    documents = np.log(np.bincount(pieces[:, 0]))
    return float(np.corrcoef(documents[1:], documents[:-1])[0, 1])
