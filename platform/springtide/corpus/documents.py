"""Records of a source: documents; token ids, which are cut and decoded to documents; and records that cannot be read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from springtide.corpus.chats import Turn
from springtide.corpus.tokenizer import Tokenizer
from springtide.errors import CorpusError, explain
from springtide.storage import to_json

MOST_TOKENS = 2**24
"""Maximum number of tokens of a document that is stored as token ids."""
_SAMPLE_IDS = 24
"""Number of token ids that an error message or report shows of a broken record."""
_TOKENS_AT_ONCE = 2**18
"""Number of tokens that are decoded together, in one call of the tokenizer."""


class Document(NamedTuple):
    """One document of a source: its text, and its token ids or chat turns if the source stores them."""

    name: str
    """Path of the file, relative to the source. If the file has several documents, ``@`` and the byte, row or number of this
    document follow, such as ``a.jsonl@1024``."""
    text: str
    ids: np.ndarray | None = None
    """uint32 (tokens,), without an end-of-text id; ``text`` is their decoded text. None if the source stores text instead."""
    turns: tuple[Turn, ...] = ()
    """Turns (messages) of a chat, or of the chosen chat of a preference pair. ``text`` is then their joined content. Empty if
    the document is not a chat."""
    rejected: tuple[Turn, ...] = ()
    """Turns (messages) of the rejected chat of a preference pair; empty for any other document."""

    @property
    def digest(self) -> bytes:
        """Hash of the text, 16 bytes: equal texts have equal digests wherever they are stored. For a chat, the hash of its
        turns. For token ids that do not decode to UTF-8, the hash of the ids: different ids may decode to the same text with
        U+FFFD."""
        if self.turns:
            # hash a turn without ``more`` as (role, content): datasets made before ``more`` existed keep their digests
            turns, rejected = ([turn if turn.more else turn[:2] for turn in one] for one in (self.turns, self.rejected))
            said = [turns, rejected] if rejected else turns
            return hashlib.blake2b(to_json(said).encode(), digest_size=16, person=b"chat").digest()
        is_exact = self.ids is None or "\ufffd" not in self.text
        data = self.text.encode() if self.ids is None or is_exact else self.ids.tobytes()
        return hashlib.blake2b(data, digest_size=16).digest()


class Broken(NamedTuple):
    """A record that cannot be read as a document."""

    name: str
    reason: str
    sample: str
    """Beginning of the record, to show in a report."""
    fields: tuple[str, ...] = ()
    """Names of the first few fields of the record, if it has no text in the field ``corpus.field``; otherwise empty."""


class Tokens(NamedTuple):
    """Token ids as stored in a file: one document, or several documents with an end-of-text id before or after each
    document."""

    name: str
    ids: np.ndarray
    """Integers (tokens,), not yet checked against the tokenizer."""


def too_long(name: str, ids: np.ndarray) -> Broken:
    """Return the Broken record for a document of more than ``MOST_TOKENS`` tokens."""
    return Broken(name, f"longer than {MOST_TOKENS:,} tokens without an end-of-text id", shown(ids))


def shown(ids: np.ndarray) -> str:
    """Return the first 24 ids as numbers separated by spaces, to show what a broken record holds."""
    return " ".join(map(str, ids[:_SAMPLE_IDS].tolist()))


def unreadable(where: str, problem: str) -> CorpusError:
    """Return the error for a damaged file of token ids. ``where``: path of the file; ``problem``: the wrong field, its value
    and its limit."""
    return CorpusError(
        explain("corpus.source", where, f"cannot be read ({problem})", "restore the file, or exclude it")
    )


def from_tokens(
    records: Iterable[Document | Broken | Tokens], where: str, vocabulary: Tokenizer | None
) -> Iterator[Document | Broken]:
    """Yield the records in order. Cut records of token ids at end-of-text ids, and decode them to documents.

    Args:
        where: path of the file with the records, for the error.
        vocabulary: the tokenizer that made the ids. If it is None, records of token ids are skipped.

    Raises:
        CorpusError: the tokenizer does not have an id of a record.
    """
    waiting: list[tuple[str, np.ndarray]] = []
    held = 0
    for record in records:
        if not isinstance(record, Tokens):
            yield from _decoded(waiting, vocabulary)
            waiting, held = [], 0
            yield record
        elif vocabulary is not None:
            _check_ids(record, where, vocabulary)
            waiting += _cut(record, vocabulary.end_of_text)
            held += len(record.ids) + 1  # count an empty record as one token: else millions of them would fill memory
            if held >= _TOKENS_AT_ONCE:
                yield from _decoded(waiting, vocabulary)
                waiting, held = [], 0
    yield from _decoded(waiting, vocabulary)


def _check_ids(record: Tokens, where: str, vocabulary: Tokenizer) -> None:
    wrong = np.flatnonzero((record.ids < 0) | (record.ids >= vocabulary.size))
    if len(wrong):
        place = int(wrong[0])
        raise CorpusError(
            explain(
                "corpus.tokenizer",
                f"{where}, document {record.name.rpartition('@')[2]}, token {place}",
                f"is id {int(record.ids[place])}, the tokenizer has the ids below {vocabulary.size}",
                "set corpus.tokenizer to the tokenizer that made these ids",
            )
        )


def _cut(record: Tokens, end_of_text: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the ids of each document in a record. Skip empty documents; a record with only empty documents yields
    one empty document."""
    ends = [*np.flatnonzero(record.ids == end_of_text).tolist(), len(record.ids)]
    begins = [0, *(end + 1 for end in ends[:-1])]
    pieces = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end] or [(0, 0)]
    for begin, end in pieces:
        name = record.name if len(pieces) == 1 else f"{record.name}+{begin}"
        yield name, record.ids[begin:end].astype(np.uint32)


def _decoded(waiting: list[tuple[str, np.ndarray]], vocabulary: Tokenizer | None) -> Iterator[Document | Broken]:
    fit = [ids if len(ids) <= MOST_TOKENS else ids[:0] for _, ids in waiting]
    texts = vocabulary.decode_all(fit) if vocabulary else []
    for (name, ids), text in zip(waiting, texts, strict=True):
        yield Document(name, text, ids) if len(ids) <= MOST_TOKENS else too_long(name, ids)
