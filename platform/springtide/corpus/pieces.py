"""Cut a document into pieces (lines or paragraphs), and remove the pieces that occurred earlier in the corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from springtide.errors import look_up

LEAST_CHARACTERS = 50
"""Minimum length of a piece that may be removed [characters]. Shorter pieces often repeat in lists, code and dialogue."""


class Piece(NamedTuple):
    """A line of a document, or a paragraph: consecutive lines that are not blank."""

    begin: int
    end: int
    """The piece is the lines [begin, end) of the document. A paragraph includes the blank lines that follow it."""
    text: str
    """Text without leading and trailing spaces. For a paragraph, also without the blank lines that follow it."""

    @property
    def is_compared(self) -> bool:
        return len(self.text) >= LEAST_CHARACTERS

    @property
    def digest(self) -> int:
        """64-bit hash of the piece's text."""
        return int.from_bytes(hashlib.blake2b(self.text.encode(), digest_size=8).digest(), "little")


def pieces(lines: list[str], kind: str) -> Iterator[Piece]:
    """Yield the lines or the paragraphs of a document, in order. ``lines``: all lines of the document; ``kind``: ``lines`` or
    ``paragraphs``."""
    yield from look_up({"lines": _lines, "paragraphs": _paragraphs}, "corpus.deduplicate", kind)(lines)


def _lines(lines: list[str]) -> Iterator[Piece]:
    yield from (Piece(at, at + 1, line.strip()) for at, line in enumerate(lines))


def _paragraphs(lines: list[str]) -> Iterator[Piece]:
    begin = text_end = 0
    for at, line in enumerate(lines):
        if line.strip():
            if text_end < at and text_end > begin:  # blank lines end the paragraph before this line
                yield Piece(begin, at, "\n".join(lines[begin:text_end]).strip())
                begin = at
            text_end = at + 1
    if text_end > begin:
        yield Piece(begin, len(lines), "\n".join(lines[begin:text_end]).strip())


def without(text: str, kind: str, is_repeated: Callable[[Piece], bool]) -> tuple[str, list[str]]:
    """Return ``text`` without its repeated pieces (lines or paragraphs), and the texts of the removed pieces. ``is_repeated``
    is called once for each piece of at least ``LEAST_CHARACTERS`` characters, in order, and returns True to remove the piece.

    >>> line = "A footer that stands below every page of a site, and says nothing."
    >>> without(f"One.\\n{line}\\nTwo.", "lines", lambda piece: True)[0]
    'One.\\nTwo.'
    """
    lines = text.split("\n")
    kept, removed = [], []
    for piece in pieces(lines, kind):
        if piece.is_compared and is_repeated(piece):
            removed.append(piece.text)
        else:
            kept += lines[piece.begin : piece.end]
    return ("\n".join(kept), removed) if removed else (text, removed)
