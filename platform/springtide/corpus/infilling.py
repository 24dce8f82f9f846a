"""Fill in the middle: rearrange documents, so that a model learns to write the text between two given texts.

Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2207.14255). A span is a whole document. A
document longer than a row of the dataset is divided into equal spans, so that a span fits a row. A rearranged span is cut at
two random characters into prefix, middle and suffix. The three are tokenised separately, and written in one of two orders,
each with probability 1/2; PREFIX, SUFFIX and MIDDLE are special tokens:

    PSM     PREFIX prefix SUFFIX suffix MIDDLE middle
    SPM     PREFIX SUFFIX suffix MIDDLE prefix middle

Which spans are rearranged, and where they are cut, depends only on the document's text and the seed.
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
"""Number of random numbers per span (a document, or a part of a long one). They decide whether the span is rearranged, where
its two cuts are, and the order of its pieces."""


class Infilling(NamedTuple):
    """Parameters of fill-in-the-middle."""

    rate: float
    """Probability, from 0 to 1, that a span (a document, or a part of a long one) is rearranged."""
    prefix_id: int
    suffix_id: int
    middle_id: int
    span_tokens: int
    """Approximate length of the longest span (a document, or a part of a long one) [tokens]."""
    seed: int


class _Span(NamedTuple):
    pieces: tuple[slice, ...]
    """Three slices, prefix, middle and suffix, if the span is rearranged for fill-in-the-middle training. Otherwise one slice,
    the whole span. Slices index the document's text, or its token ids if the source stores ids."""
    is_spm: bool = False


def check_pieces(vocabulary: Tokenizer, setting: str, value: Any) -> None:
    """Raise ConfigError if a text that is tokenised in pieces decodes to another text. The error names ``setting`` =
    ``value``, which needs tokenising in pieces."""
    [piece] = vocabulary.encode(["x"])
    if (found := vocabulary.decode([*piece[:-1], *piece[:-1]])) != "xx":
        problem = f"needs a tokenizer that keeps the pieces of a text: 'x' and 'x' become {found!r} with this one"
        raise ConfigError(explain(setting, value, problem, f"use a byte-level tokenizer, or leave {setting} out"))


def infill(
    documents: Sequence[Document], lengths: Iterable[int], vocabulary: Tokenizer, infilling: Infilling
) -> Iterator[list[np.ndarray] | None]:
    """Rearrange documents for fill-in-the-middle training. Yield for each document its tokens as a list of segments, uint32
    arrays. Yield None for a document that stays unchanged.

    A span is a document, or a part of a long one. Each rearranged span is a segment. The text between two rearranged spans is
    also a segment. The caller must put an end-of-text id and a begin-of-text id between two segments, as between two documents.

    Args:
        documents: the documents. A document that the source stores as token ids is cut between tokens, any other document
            between characters.
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
        if len(whole) < len(found):  # the tokenizer cannot encode a piece: leave the document unchanged
            yield None
            continue
        cut = iter(whole)
        yield [_laid_out([next(cut) for _ in span.pieces], span, infilling) for span in spans]


def _is_changed(spans: Sequence[_Span]) -> bool:
    return any(len(span.pieces) > 1 for span in spans)


def _spans(document: Document, length: int, infilling: Infilling) -> Iterator[_Span]:
    """Cut a document into spans: one, or several equal spans if it is long. Yield each span that is rearranged for
    fill-in-the-middle training. Join consecutive other spans, and yield them as one span."""
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
