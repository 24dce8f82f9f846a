"""Fill in the middle: reorder spans of a document, so that a model learns to write the text between two given texts.

Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2207.14255). A span is cut at two random
characters into prefix, middle and suffix. They are tokenised separately, and laid out in one of two orders, at even odds:

    PSM     PREFIX prefix SUFFIX suffix MIDDLE middle
    SPM     PREFIX SUFFIX suffix MIDDLE prefix middle

A span is a document; a document longer than a row is divided into equal spans, so that a span fits a row. Which spans are
reordered, and where they are cut, depends only on the document's text and the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from springtide.corpus.documents import Document
from springtide.corpus.tokenizer import Tokenizer
from springtide.errors import ConfigError, explain

_WORDS = 4
"""Random numbers per span: whether to reorder it, the two cuts, and the order."""


class Infilling(NamedTuple):
    """Parameters of fill-in-the-middle."""

    rate: float
    """Share of the spans that are reordered."""
    prefix_id: int
    suffix_id: int
    middle_id: int
    span_tokens: int
    """Approximate length of the longest span [tokens]."""
    seed: int


class _Span(NamedTuple):
    pieces: tuple[slice, ...]
    """The whole span, or its prefix, middle and suffix: slices of the text, or of the ids of a document that came as ids."""
    is_spm: bool = False


def check_pieces(vocabulary: Tokenizer, setting: str, value: Any) -> None:
    """Raise ConfigError if the tokenizer changes a text that is tokenised in pieces, as ``setting`` = ``value`` requires."""
    [piece] = vocabulary.encode(["x"])
    if (found := vocabulary.decode([*piece[:-1], *piece[:-1]])) != "xx":
        problem = f"needs a tokenizer that keeps the pieces of a text: 'x' and 'x' become {found!r} with this one"
        raise ConfigError(explain(setting, value, problem, f"use a byte-level tokenizer, or leave {setting} out"))


def infill(
    documents: Sequence[Document], lengths: Iterable[int], vocabulary: Tokenizer, infilling: Infilling
) -> Iterator[list[np.ndarray] | None]:
    """Yield the tokens of each document, uint32, as a list of segments; None for a document without a reordered span. Each
    reordered span is a segment, and so is the text between two of them. The caller must separate segments like documents: they
    have neither end-of-text nor begin-of-text.

    Args:
        documents: the documents; those that came as ids are cut between tokens, not characters.
        lengths: number of tokens of each document.
    """
    planned = [list(_spans(document, length, infilling)) for document, length in zip(documents, lengths, strict=True)]
    texts = (
        document.text[piece]
        for document, spans in zip(documents, planned, strict=True)
        if document.ids is None and _is_changed(spans)
        for span in spans
        for piece in span.pieces
    )
    encoded = vocabulary.try_encode(texts)
    for document, spans in zip(documents, planned, strict=True):
        if not _is_changed(spans):
            yield None
            continue
        ids = document.ids
        flat = [ids[piece] if ids is not None else next(encoded) for span in spans for piece in span.pieces]
        found = [one if one is None or ids is not None else one[:-1] for one in flat]
        whole = [one for one in found if one is not None]
        if len(whole) < len(found):  # the tokenizer cannot split a piece, although it can split the text
            yield None
            continue
        cut = iter(whole)
        yield [_laid_out([next(cut) for _ in span.pieces], span, infilling) for span in spans]


def _is_changed(spans: Sequence[_Span]) -> bool:
    return any(len(span.pieces) > 1 for span in spans)


def _spans(document: Document, length: int, infilling: Infilling) -> Iterator[_Span]:
    """Yield the spans of a document. Neighbouring spans that are not reordered are joined to one."""
    size = len(document.text) if document.ids is None else len(document.ids)
    number = max(1, -(-length // infilling.span_tokens))
    bounds = [size * at // number for at in range(number + 1)]
    key = infilling.seed.to_bytes(8, "little")
    plain = 0
    for at in range(number):
        begin, end = bounds[at], bounds[at + 1]
        salt = at.to_bytes(8, "little")
        random = hashlib.blake2b(document.digest, key=key, salt=salt, person=b"fim", digest_size=8 * _WORDS).digest()
        whether, one, other, order = np.frombuffer(random, "<u8").tolist()
        if whether / 2.0**64 >= infilling.rate:
            continue
        if plain < begin:
            yield _Span((slice(plain, begin),))
        first, last = sorted((begin + one % (end - begin + 1), begin + other % (end - begin + 1)))
        yield _Span((slice(begin, first), slice(first, last), slice(last, end)), bool(order & 1))
        plain = end
    if plain < size:
        yield _Span((slice(plain, size),))


def _laid_out(pieces: list[np.ndarray], span: _Span, infilling: Infilling) -> np.ndarray:
    if len(pieces) == 1:
        return pieces[0].astype(np.uint32)
    prefix, middle, suffix = pieces
    before, after, between = (
        np.array([one], np.uint32) for one in (infilling.prefix_id, infilling.suffix_id, infilling.middle_id)
    )
    if span.is_spm:
        return np.concatenate([before, after, suffix, between, prefix, middle]).astype(np.uint32)
    return np.concatenate([before, prefix, after, suffix, between, middle]).astype(np.uint32)
