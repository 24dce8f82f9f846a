"""Find near-duplicates, documents that share most of their runs of five tokens, without comparing all pairs of documents.

Every run of five tokens is hashed. A document's signature is the smallest hash in each of 128 bins (ranges of hash values; Li,
Owen and Zhang, "One permutation hashing", 2012). It takes one hash per token instead of 128. It is used in two steps.

1. Bands propose pairs. A band is 8 of the 128 bins; there are 16 bands. Two documents are compared if they agree in all bins of
   a band. An empty bin copies the hash of another bin ("optimal densification", Shrivastava, 2017). So two documents agree in a
   bin with a probability equal to their Jaccard similarity s, and in at least one band with probability 1 - (1 - s^8)^16: 0.26
   at s = 0.6, 0.61 at 0.7, 0.95 at 0.8, 0.9998 at 0.9.
2. Sketches verify the pairs. A sketch holds 8 bits of each bin's smallest hash (Li and Koenig, "b-Bit minwise hashing", 2010),
   and which bins are empty. The similarity estimated from two sketches has a standard deviation of at most 0.04. A document is
   dropped only if its estimated similarity with a kept document is at least SIMILAR. An equal band is not enough: among
   thousands of files with the same licence, some have an equal band by chance.
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
"""Minimum Jaccard similarity of near-duplicates. It is about (1/16)^(1/8), where the probability that two documents are
compared rises most steeply."""
BINS = 128
BANDS = 16
_EMPTY = 0
"""Value of an empty bin in a sketch: no hash of the document lies in the bin."""
_VALUES = 255
"""A bin that is not empty has one of the values 1 to 255 in a sketch."""
_PAIRS_AT_ONCE = 2**16
_ROUNDS = 8
"""Maximum number of rounds of comparisons. If a group of similar documents needs more rounds, a few near-duplicates stay in the
dataset."""
_SHIFT = np.uint64(64 - 7)
_PRIME = np.uint64(0x9E3779B97F4A7C15)


class Signature(NamedTuple):
    """Hashes of a document by which its near-duplicates are found."""

    bands: np.ndarray
    """uint64 (BANDS,): one hash per band of 8 bins. Documents with an equal band are compared."""
    sketch: np.ndarray
    """uint8 (BINS,): 1 to 255, from the smallest hash in each bin; 0 for an empty bin."""


class NearDuplicates(NamedTuple):
    """Result of the search: which documents are kept, and which kept document each dropped document resembles."""

    kept: np.ndarray
    """int64 (documents,): index of the document that is kept instead of document i; i if document i itself is kept."""
    similarity: np.ndarray
    """float32 (documents,): the estimated Jaccard similarity of document i and document ``kept[i]``."""


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
    """Return a signature that matches only documents with an equal ``digest``, a hash of at least 16 bytes. Chats use it:
    two chats with an equal long system prompt share most tokens, but are not duplicates."""
    values = np.frombuffer(digest[:16], "<u8")
    bands = mix(values[0] + np.arange(BANDS, dtype=np.uint64)) ^ values[1]
    sketch = mix(values[1] + np.arange(BINS, dtype=np.uint64)) % np.uint64(_VALUES) + np.uint64(1)
    return Signature(bands, sketch.astype(np.uint8))


def similarity(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Estimate the Jaccard similarity of n pairs of documents, float32 (n,). ``one`` and ``other`` are the sketches of the
    first and the second document of each pair, uint8 (n, BINS)."""
    filled = (one != _EMPTY) & (other != _EMPTY)
    agree = np.sum(filled & (one == other), axis=1)
    by_chance = np.sum(filled, axis=1) / _VALUES
    used = np.sum((one != _EMPTY) | (other != _EMPTY), axis=1)
    return np.clip((agree - by_chance) / (used * (1 - 1 / _VALUES)), 0, 1).astype(np.float32)


def recall(similarity: float) -> float:
    """Return the probability that two documents of this Jaccard similarity have an equal band, so that they are compared."""
    return 1 - (1 - similarity ** (BINS // BANDS)) ** BANDS


def sharing(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the documents whose hash equals the hash of another document.

    ``hashes``: hash of one band of each document, uint64 (documents,). Returns two arrays, int64 (m,): the indices of the
    documents found, and for each document a number, from 0, that is equal for equal hashes. Both are sorted by this number,
    then by document.

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
    """Find near-duplicates, and keep the first of several similar documents.

    In each of the 16 bands, a document is compared only with the first document that has an equal hash. This makes at most 16
    comparisons per document, no matter how many documents have the hash. If the first document is dropped, the next round
    compares with the next document that has the hash. Needs memory only for the pairs, 8 bytes each.

    Args:
        bands: called once per round; returns for each band what ``sharing`` returns: the documents whose hash is not unique,
            and for each document a number that is equal for equal hashes.
        sketches: called once, with all documents to compare, int64 (n,), ascending. Returns a function that maps some of these
            documents, (m,), to their sketches, uint8 (m, BINS).
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
                # pairs are sorted by ``document``, so it is already decided whether ``other``, which comes earlier, is kept
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
    """Return the pairs of documents to compare, sorted. In each band, the first of all documents with an equal hash is paired
    with each of the others. Documents that are not ``alive``, bool (documents,), are left out. A pair is one int64: index of
    the later document * number of documents + index of the first document."""
    found = np.empty(0, np.int64)
    for documents, hashes in bands:
        documents, hashes = documents[alive[documents]], hashes[alive[documents]]
        begins = np.ones(len(documents), dtype=bool)
        begins[1:] = hashes[1:] != hashes[:-1]
        first = documents[begins][np.cumsum(begins) - 1]
        found = np.union1d(found, (documents * len(alive) + first)[~begins])
    return found


def shingles(ids: np.ndarray) -> np.ndarray:
    """Return the distinct hashes of all runs of 5 tokens in a document, sorted uint32. ``ids``: its token ids (n,). Hashes of
    32 bits are enough to compare two documents."""
    return np.unique((_shingles(ids.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32))


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Return the Jaccard similarity of two documents, given as their ``shingles`` (sorted hashes of runs of tokens)."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / max(len(one) + len(other) - shared, 1)


def _shingles(ids: np.ndarray) -> np.ndarray:
    """Return the hash of every run of 5 (SHINGLE) token ids. For a document of fewer ids, return one hash of all its ids."""
    return hash_runs(ids, min(SHINGLE, len(ids)))


def hash_runs(ids: np.ndarray, width: int) -> np.ndarray:
    """Return the hash of every run of ``width`` consecutive ids, uint64 (n - width + 1,). ``ids``: uint64 (n,), n >= width."""
    count = len(ids) - width + 1
    state = np.zeros(count, dtype=np.uint64)
    for place in range(width):
        state = (state + ids[place : place + count] + np.uint64(1)) * _PRIME
    return mix(state)


def _densified(found: np.ndarray, filled: np.ndarray) -> np.ndarray:
    """Return the smallest hash in each bin, uint64 (BINS,). An empty bin copies the hash of a filled bin. Which filled bin it
    copies depends only on the empty bin's number and on which bins are empty, so equal documents copy equally.

    ``found``: smallest hash of each bin, arbitrary for an empty bin; ``filled``: whether each bin has a hash."""
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
# A document quotes a benchmark text if both contain the same run of 13 words (Brown et al., GPT-3, 2020, appendix C), ignoring
# case and punctuation. A benchmark text of 8 to 12 words counts as quoted if the whole text occurs in the document. Shorter
# benchmark texts are ignored, because they occur by chance.

_RUN, _SHORTEST = 13, 8
_WORD = re.compile(r"\w+")

Quotes = dict[int, np.ndarray]
"""n -> hashes of the runs of n consecutive words in benchmark texts, sorted uint64. n is 13, or 8 to 12 for short texts."""


def quotes_of(texts: Iterable[str]) -> tuple[Quotes, int, int]:
    """Hash the runs of words in benchmark texts. Return the hashes, the number of texts, and how many of the texts are ignored
    because they have fewer than 8 words."""
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
    """Return whether ``text`` contains a run of words whose hash is in ``looked_for``."""
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
    # not Python's hash(), which differs between processes; encode() cannot fail, because reading has replaced surrogates
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
