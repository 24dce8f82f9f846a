"""Texts of benchmarks, and documents that quote them.

A document quotes a text if they share a run of 13 words (Brown et al., GPT-3, 2020, appendix C), case and punctuation aside. Of
a text with fewer words, the document must contain all; with fewer than 8 words it would be met by chance.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Iterable

import numpy as np

from springtide.corpus.near_duplicates import hash_runs

_RUN, _SHORTEST = 13, 8
_WORD = re.compile(r"\w+")

Quotes = dict[int, np.ndarray]
"""Length of a run of words -> the hashes of such runs, sorted uint64 (n,)."""


def quotes_of(texts: Iterable[str]) -> tuple[Quotes, int, int]:
    """Return the runs of words to look for, the number of texts, and how many of them are too short to look for."""
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
    """Return whether ``text`` contains one of the runs."""
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
    # surrogates were replaced when the document was read; Python's own hash differs from process to process
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
