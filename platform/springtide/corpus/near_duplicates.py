"""Near-duplicates: documents that share most of their runs of five tokens, found without comparing all pairs.

A signature has one minimum for each of 128 bins of hash values (Li, Owen and Zhang, "One permutation hashing", 2012; empty
bins borrow by "optimal densification", Shrivastava, 2017): one hash per token instead of 128. Two documents agree in a bin
with a probability equal to their Jaccard similarity s, so in all 8 bins of at least one of 16 bands with probability
1 - (1 - s^8)^16: 0.26 at s = 0.6, 0.61 at 0.7, 0.95 at 0.8, 0.9998 at 0.9.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from springtide.store.digest import mix

SHINGLE = 5
SIMILAR = 0.7
"""Least similarity of near-duplicates, where the bands' probability has its steepest rise: (1/16)^(1/8). Bands only propose
pairs."""
BINS = 128
BANDS = 16
_SHIFT = np.uint64(64 - 7)
_PRIME = np.uint64(0x9E3779B97F4A7C15)


def bands(ids: np.ndarray) -> np.ndarray:
    """Return the hash of each band of a document's signature, uint64 (BANDS,), from its token ids (n,)."""
    signature = _minima(_shingles(ids.astype(np.uint64))).reshape(BANDS, -1)
    hashes = np.arange(BANDS, dtype=np.uint64)
    for column in signature.T:
        hashes = mix(hashes ^ column)
    return hashes


def recall(similarity: float) -> float:
    """Return the probability that two documents with this Jaccard similarity share a band."""
    return 1 - (1 - similarity ** (BINS // BANDS)) ** BANDS


def clusters(columns: Iterable[np.ndarray], documents: int) -> np.ndarray:
    """Return the cluster of every document, int32 (documents,): documents that share a band, directly or through others.

    ``columns`` yields, band by band, that band's hashes of all documents, uint64 (documents,).
    """
    # imported here, so that everything else works without scipy
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    left, right = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for column in columns:
        order = np.argsort(column, kind="stable")
        same = np.flatnonzero(column[order[1:]] == column[order[:-1]])
        left.append(order[same])
        right.append(order[same + 1])
    pairs = (np.concatenate(left), np.concatenate(right))
    graph = coo_array((np.ones(len(pairs[0]), dtype=np.int8), pairs), shape=(documents, documents))
    return connected_components(graph, directed=False)[1]


def shingles(ids: np.ndarray) -> np.ndarray:
    """Return the set of hashes of a document's runs of SHINGLE ids (n,), sorted uint32; 32 bits suffice to compare two."""
    return np.unique((_shingles(ids.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32))


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Return the Jaccard similarity of two results of ``shingles``."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / max(len(one) + len(other) - shared, 1)


def _shingles(ids: np.ndarray) -> np.ndarray:
    """Return the hash of every run of SHINGLE ids; of the whole document if it is shorter."""
    return hash_runs(ids, min(SHINGLE, len(ids)))


def hash_runs(ids: np.ndarray, width: int) -> np.ndarray:
    """Return the hash of every run of ``width`` ids, uint64 (n,), of at least as many."""
    count = len(ids) - width + 1
    state = np.zeros(count, dtype=np.uint64)
    for place in range(width):
        state = (state + ids[place : place + count] + np.uint64(1)) * _PRIME
    return mix(state)


def _minima(hashes: np.ndarray) -> np.ndarray:
    """Return the smallest hash in each bin, uint64 (BINS,). An empty bin copies that of another bin, which its own number and
    the set of empty bins determine."""
    hashes = np.sort(hashes)
    first = np.searchsorted(hashes >> _SHIFT, np.arange(BINS, dtype=np.uint64))
    found = hashes[np.minimum(first, len(hashes) - 1)]
    filled = (first < len(hashes)) & (found >> _SHIFT == np.arange(BINS, dtype=np.uint64))
    source = np.arange(BINS)
    empty = np.flatnonzero(~filled)
    tries = 0
    while len(empty):
        tries += 1
        source[empty] = (mix(empty.astype(np.uint64) + np.uint64(tries << 32)) >> _SHIFT).astype(np.int64)
        empty = empty[~filled[source[empty]]]
    return found[source]
