"""Sample ids, and the digest of a set of sample ids. A sample id is one integer that encodes the number of a corpus (upper 16
bits) and the number of a row in this corpus (lower 48 bits)."""

from __future__ import annotations

import numpy as np

from springtide.storage.digest import mix

_CORPUS_SHIFT = np.uint64(48)
MOST_CORPORA = 2**16


def join(corpus: int | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the sample ids, uint64 (n,), of the row numbers ``rows``, int (n,). ``corpus``: number of the corpus, one for all
    rows or one per row."""
    return (np.asarray(corpus).astype(np.uint64) << _CORPUS_SHIFT) | rows.astype(np.uint64)


def corpus_and_row(sample_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the corpus number of each sample id, and the row number in that corpus, int64 (n,) each."""
    ids = sample_ids.astype(np.uint64)
    rows = ids & ((np.uint64(1) << _CORPUS_SHIFT) - np.uint64(1))
    return (ids >> _CORPUS_SHIFT).astype(np.int64), rows.astype(np.int64)


def digest(sample_ids: np.ndarray) -> int:
    """Return a 64-bit digest of a set of sample ids, independent of their order: the sum of their hashes mod 2**64.

    The digest of a batch is the sum of its ranks' digests, so each rank can compute the digest of its own rows.
    """
    return int(np.sum(mix(sample_ids), dtype=np.uint64)) if len(sample_ids) else 0
