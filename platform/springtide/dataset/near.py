"""Near-duplicates among the documents of all parts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from springtide.corpus import BINS, NearDuplicates, find_near_duplicates
from springtide.dataset.parts import read_columns, read_sketches
from springtide.dataset.signatures import BAND_COLUMNS
from springtide.store import Folder


def near_duplicates_among(work: Folder, parts: Sequence[int], order: np.ndarray) -> NearDuplicates:
    """Compare the documents ``order``, int64 (n,), which counts all rows of all parts; of similar ones the first is kept.

    Memory holds one band at a time and the pairs. The sketches of documents that share a band go to a temporary file on this
    machine, 128 bytes each.
    """
    with tempfile.TemporaryFile() as file:

        def sketches(shared: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
            rows = np.sort(order[shared])
            place = np.zeros(len(order), np.int32)
            place[shared] = np.searchsorted(rows, order[shared])
            begin = 0
            for part in parts:
                found = read_sketches(work, part)
                first, last = np.searchsorted(rows, [begin, begin + len(found)])
                file.write(found[rows[first:last] - begin].tobytes())
                begin += len(found)
            file.flush()
            stored = np.memmap(file, np.uint8, "r", shape=(len(rows), BINS))
            return lambda some: stored[place[some]]

        return find_near_duplicates(lambda: read_bands_of(work, parts, order), sketches, len(order))


def read_bands_of(work: Folder, parts: Sequence[int], order: np.ndarray) -> Iterator[np.ndarray]:
    """Yield, band by band, that band's hashes of the documents ``order``, uint64 (n,)."""
    for name in BAND_COLUMNS:
        yield np.concatenate([read_columns(work, number, [name])[name].to_numpy() for number in parts])[order]
