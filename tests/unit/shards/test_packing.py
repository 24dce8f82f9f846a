"""Documents fitted into rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from springtide.shards import best_fit


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
