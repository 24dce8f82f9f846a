"""Near-duplicates: documents that share most of their runs of five tokens, found without comparing all pairs.

A signature has one minimum for each of 128 bins of hash values (Li, Owen and Zhang, "One permutation hashing", 2012), which
takes one hash per token instead of 128. A signature is used twice.

Bands propose pairs. Empty bins borrow by "optimal densification" (Shrivastava, 2017); then two documents agree in a bin with a
probability equal to their Jaccard similarity s, so in all 8 bins of at least one of 16 bands with probability
1 - (1 - s^8)^16: 0.26 at s = 0.6, 0.61 at 0.7, 0.95 at 0.8, 0.9998 at 0.9.

Sketches verify the pairs. A sketch holds 8 bits of each minimum (Li and Koenig, "b-Bit minwise hashing", 2010) and which bins
are empty. The standard deviation of the similarity that two sketches estimate is at most 0.04. A document is dropped only if
its estimated similarity with a kept document is at least SIMILAR. Sharing a band is not enough: among thousands of files with
the same licence some share a band by chance.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from springtide.storage.digest import mix

SHINGLE = 5
SIMILAR = 0.7
"""Least Jaccard similarity of near-duplicates: (1/16)^(1/8), where the probability to share a band rises most steeply."""
BINS = 128
BANDS = 16
_EMPTY = 0
"""Value in a sketch of a bin without a hash."""
_VALUES = 255
"""Number of values in a sketch of a bin that is not empty."""
_PAIRS_AT_ONCE = 2**16
_ROUNDS = 8
"""Most rounds of comparisons. In a cluster that needs more rounds, a few near-duplicates are kept."""
_SHIFT = np.uint64(64 - 7)
_PRIME = np.uint64(0x9E3779B97F4A7C15)


class Signature(NamedTuple):
    """Hashes of a document by which its near-duplicates are found."""

    bands: np.ndarray
    """uint64 (BANDS,): a hash of each band."""
    sketch: np.ndarray
    """uint8 (BINS,): 8 bits of each bin's minimum, ``_EMPTY`` for an empty bin."""


class NearDuplicates(NamedTuple):
    """For each document, the kept document of which it is a near-duplicate."""

    kept: np.ndarray
    """int64 (documents,): the document that is kept in place of each document; itself if it is kept."""
    similarity: np.ndarray
    """float32 (documents,): the estimated Jaccard similarity with the document in ``kept``."""


def signature(ids: np.ndarray) -> Signature:
    """Return the signature of a document from its token ids (n,)."""
    hashes = np.sort(_shingles(ids.astype(np.uint64)))
    first = np.searchsorted(hashes >> _SHIFT, np.arange(BINS, dtype=np.uint64))
    found = hashes[np.minimum(first, len(hashes) - 1)]
    filled = (first < len(hashes)) & (found >> _SHIFT == np.arange(BINS, dtype=np.uint64))
    sketch = np.where(filled, found % np.uint64(_VALUES) + np.uint64(1), _EMPTY).astype(np.uint8)
    bands = np.arange(BANDS, dtype=np.uint64)
    for column in _densified(found, filled).reshape(BANDS, -1).T:
        bands = mix(bands ^ column)
    return Signature(bands, sketch)


def exact_signature(digest: bytes) -> Signature:
    """Return a signature that matches only documents with the same digest, of 16 bytes or more. Chats use it, because two chats
    that share a long instruction are not near-duplicates."""
    values = np.frombuffer(digest[:16], "<u8")
    bands = mix(values[0] + np.arange(BANDS, dtype=np.uint64)) ^ values[1]
    sketch = mix(values[1] + np.arange(BINS, dtype=np.uint64)) % np.uint64(_VALUES) + np.uint64(1)
    return Signature(bands, sketch.astype(np.uint8))


def similarity(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Estimate the Jaccard similarity of n pairs of documents from the sketches of each pair, uint8 (n, BINS) both. Return
    float32 (n,)."""
    filled = (one != _EMPTY) & (other != _EMPTY)
    agree = np.sum(filled & (one == other), axis=1)
    by_chance = np.sum(filled, axis=1) / _VALUES
    used = np.sum((one != _EMPTY) | (other != _EMPTY), axis=1)
    return np.clip((agree - by_chance) / (used * (1 - 1 / _VALUES)), 0, 1).astype(np.float32)


def recall(similarity: float) -> float:
    """Return the probability that two documents with this Jaccard similarity share a band, and so are compared."""
    return 1 - (1 - similarity ** (BINS // BANDS)) ** BANDS


def sharing(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the documents whose hash equals that of another document. Return their indices, and for each the number of its hash,
    int64 (m,) both, sorted by hash number and then by document. ``hashes``: hash of one band of each document, uint64
    (documents,).

    Example:
        >>> import numpy as np
        >>> from springtide.corpus import sharing
        >>> [found.tolist() for found in sharing(np.array([7, 3, 7, 5, 3], np.uint64))]
        [[1, 4, 0, 2], [0, 0, 1, 1]]
    """
    order = np.argsort(hashes, kind="stable")
    same = hashes[order[1:]] == hashes[order[:-1]]
    is_shared = np.zeros(len(order), dtype=bool)
    is_shared[1:] |= same
    is_shared[:-1] |= same
    is_new = is_shared.copy()
    is_new[1:] &= ~same
    return order[is_shared], (np.cumsum(is_new) - 1)[is_shared]


def find_near_duplicates(
    bands: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]],
    sketches: Callable[[np.ndarray], Callable[[np.ndarray], np.ndarray]],
    documents: int,
) -> NearDuplicates:
    """Find near-duplicates; the first of several similar documents is kept.

    In each band a document is compared only with the first document that has the same hash: at most 16 comparisons, however
    many documents share a hash. If that first document is itself dropped, the next round compares with the next document. Takes
    memory only for the pairs, 8 bytes each.

    Args:
        bands: yields, band by band, the documents that share a hash and a number for each hash, as ``sharing`` returns them;
            called once per round.
        sketches: called once with the documents to compare, int64 (n,), ascending; returns a function that maps some of
            these documents, (m,), to their sketches, uint8 (m, BINS).
        documents: number of documents.

    Example:
        >>> import numpy as np
        >>> from springtide.corpus import find_near_duplicates, sharing, signature
        >>> texts = [np.arange(300), np.arange(1, 300), np.arange(300, 600)]
        >>> found = [signature(ids) for ids in texts]
        >>> all_sketches = np.stack([one.sketch for one in found])
        >>> shared = [sharing(column) for column in np.stack([one.bands for one in found]).T]
        >>> find_near_duplicates(lambda: shared, lambda _: lambda some: all_sketches[some], 3).kept.tolist()
        [0, 0, 2]
    """
    kept, similar = np.arange(documents), np.ones(documents, np.float32)
    was_kept, stands_for_others = np.ones(documents, dtype=bool), np.zeros(documents, dtype=bool)
    pairs = _pairs(bands(), was_kept)
    if not len(pairs):
        return NearDuplicates(kept, similar)
    read = sketches(np.unique(np.concatenate(np.divmod(pairs, documents))))
    compared = pairs
    for _ in range(_ROUNDS):
        for begin in range(0, len(pairs), _PAIRS_AT_ONCE):
            later, first = np.divmod(pairs[begin : begin + _PAIRS_AT_ONCE], documents)
            found = similarity(read(later), read(first))
            close = found >= SIMILAR
            for document, other, how in zip(later[close].tolist(), first[close].tolist(), found[close], strict=True):
                # pairs ascend by document, so it is already decided whether the earlier document ``other`` is kept
                if kept[document] == document and kept[other] == other and not stands_for_others[document]:
                    kept[document], similar[document], stands_for_others[other] = other, how, True
        is_kept = kept == np.arange(documents)
        later, first = np.divmod(compared, documents)
        if not np.any(is_kept[later] & was_kept[first] & ~is_kept[first]):
            break
        was_kept = is_kept
        pairs = np.setdiff1d(_pairs(bands(), is_kept), compared, assume_unique=True)
        compared = np.union1d(compared, pairs)
    return NearDuplicates(kept, similar)


def _pairs(bands: Iterable[tuple[np.ndarray, np.ndarray]], alive: np.ndarray) -> np.ndarray:
    """Return the pairs to compare among the documents that are ``alive``, bool (documents,). A pair is encoded as later *
    documents + first; int64, ascending."""
    found = np.empty(0, np.int64)
    for documents, hashes in bands:
        documents, hashes = documents[alive[documents]], hashes[alive[documents]]
        begins = np.ones(len(documents), dtype=bool)
        begins[1:] = hashes[1:] != hashes[:-1]
        first = documents[begins][np.cumsum(begins) - 1]
        found = np.union1d(found, (documents * len(alive) + first)[~begins])
    return found


def shingles(ids: np.ndarray) -> np.ndarray:
    """Return the distinct hashes of a document's runs of SHINGLE ids (n,), sorted uint32. 32 bits are enough to compare two
    documents."""
    return np.unique((_shingles(ids.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32))


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Return the Jaccard similarity of two documents, given as their ``shingles`` (sorted hashes of runs of tokens)."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / max(len(one) + len(other) - shared, 1)


def _shingles(ids: np.ndarray) -> np.ndarray:
    """Return the hash of every run of SHINGLE ids, or of the whole document if it is shorter."""
    return hash_runs(ids, min(SHINGLE, len(ids)))


def hash_runs(ids: np.ndarray, width: int) -> np.ndarray:
    """Return the hash of every run of ``width`` ids, uint64 (n - width + 1,). ``ids``: uint64 (n,), n >= ``width``."""
    count = len(ids) - width + 1
    state = np.zeros(count, dtype=np.uint64)
    for place in range(width):
        state = (state + ids[place : place + count] + np.uint64(1)) * _PRIME
    return mix(state)


def _densified(found: np.ndarray, filled: np.ndarray) -> np.ndarray:
    """Return the smallest hash of each bin, uint64 (BINS,). An empty bin copies the hash of a filled bin. The number of the
    empty bin and the set of empty bins determine which filled bin."""
    source = np.arange(BINS)
    empty = np.flatnonzero(~filled)
    tries = 0
    while len(empty):
        tries += 1
        source[empty] = (mix(empty.astype(np.uint64) + np.uint64(tries << 32)) >> _SHIFT).astype(np.int64)
        empty = empty[~filled[source[empty]]]
    return found[source]


# Find documents that quote texts of benchmarks.
#
# A document quotes a text if they share a run of 13 words (Brown et al., GPT-3, 2020, appendix C), ignoring case and
# punctuation. A text of 8 to 12 words must occur whole. Shorter texts are ignored, because they occur by chance.

_RUN, _SHORTEST = 13, 8
_WORD = re.compile(r"\w+")

Quotes = dict[int, np.ndarray]
"""Length of a run of words -> hashes of the benchmark texts' runs of this length, sorted uint64 (n,)."""


def quotes_of(texts: Iterable[str]) -> tuple[Quotes, int, int]:
    """Return the hashed runs of words to search for, the number of texts, and the number of texts that are too short."""
    found: dict[int, list[np.ndarray]] = {}
    count = short = 0
    for text in texts:
        words, count = _words(text), count + 1
        if len(words) < _SHORTEST:
            short += 1
            continue
        width = min(_RUN, len(words))
        found.setdefault(width, []).append(hash_runs(words, width))
    return {width: np.unique(np.concatenate(hashes)) for width, hashes in found.items()}, count, short


def quotes(text: str, looked_for: Quotes) -> bool:
    """Return whether ``text`` contains one of the runs of words in ``looked_for``."""
    words = _words(text) if looked_for else np.empty(0, np.uint64)
    return any(
        bool(np.isin(hash_runs(words, width), hashes).any())
        for width, hashes in looked_for.items()
        if len(words) >= width
    )


def _words(text: str) -> np.ndarray:
    return np.array(
        [_word(word) for word in _WORD.findall(unicodedata.normalize("NFKC", text).lower())], dtype=np.uint64
    )


@functools.lru_cache(maxsize=2**18)
def _word(word: str) -> int:
    # encoding cannot fail: surrogates were replaced when the document was read. Python's hash() differs between processes
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
