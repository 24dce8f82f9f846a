"""The values of JSON in bounded memory: those of a ``.json`` file, one after the other, and lines.

A file holds the elements of an array, a pretty-printed object, or objects that follow one another. A value ends where its
brackets do, so only brackets, commas and quotes are looked at; whoever gets a value parses it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator, Iterator
from typing import IO, Any

from pydantic_core import from_json

from springtide.storage import most_values

_READ_BYTES = 2**20
_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
"""Matches the rest of a JSON string: up to its closing quote, or to the end of the buffer."""
_SPACES = re.compile(rb"[ \t\r\n]*+")


def split_values(file: IO[bytes], most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the place and the text of each value of a file. Text that is no value is yielded as one, too: it does not parse.

    Args:
        most_bytes: of a longer value, the first ``most_bytes`` + 1 bytes are yielded.
    """
    values = _Values(most_bytes)
    held = b""
    while data := file.read(_READ_BYTES):
        chunk = held + data
        if values.place == 0 and chunk.startswith(codecs.BOM_UTF8):
            values.place, chunk = len(codecs.BOM_UTF8), chunk[len(codecs.BOM_UTF8) :]
        held = yield from values.split(chunk)
        values.place += len(chunk) - len(held)
    yield from values.end(held)


class _Values:
    """Where the split is in the text, between two chunks."""

    def __init__(self, most_bytes: int) -> None:
        self.place = 0
        """Of the chunk in the file."""
        self._most_bytes = most_bytes
        self._value, self._value_at = bytearray(), 0
        self._depth = 0
        """Open brackets of the value."""
        self._is_in_array = self._is_in_string = False

    def split(self, chunk: bytes) -> Generator[tuple[int, bytes], None, bytes]:
        """Yield the values that end in ``chunk``; return what cannot be judged without the next one: half an escape."""
        begin = at = 0
        end = len(chunk)
        while at < end:
            if self._is_in_string:
                at = _INSIDE.match(chunk, at).end()  # type: ignore[union-attr]
                if chunk[at : at + 1] == b"\\":
                    self._take(chunk, begin, at)
                    return chunk[at:]
                self._is_in_string = at == end
                at += 1
                continue
            found = _OUTSIDE.search(chunk, at)
            if found is None:
                break
            mark, at = found[0], found.end()
            is_outermost = self._depth == 0
            if mark == b'"':
                self._is_in_string = True
            elif mark == b",":
                if is_outermost and self._is_in_array:
                    yield from self._ended(chunk, begin, at - 1)
                    begin = at
            elif mark in b"[{":
                if self._is_in_array or not is_outermost:
                    self._depth += 1
                    continue
                yield from self._ended(chunk, begin, at - 1)
                if mark == b"[":
                    self._is_in_array, begin = True, at
                else:
                    self._depth, begin = 1, at - 1
            elif not is_outermost:
                self._depth -= 1
                if self._depth == 0 and not self._is_in_array:
                    yield from self._ended(chunk, begin, at)
                    begin = at
            elif self._is_in_array:
                yield from self._ended(chunk, begin, at - 1)
                self._is_in_array, begin = False, at
        self._take(chunk, begin, end)
        return b""

    def end(self, held: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield what is left at the end of the file: nothing, unless the file is cut or no JSON."""
        cut = held or (b"[" if self._is_in_array else b"")
        yield from self._ended(cut, 0, len(cut))

    def _take(self, chunk: bytes, begin: int, end: int) -> None:
        if not self._value:
            begin = min(end, _SPACES.match(chunk, begin).end())  # type: ignore[union-attr]
            self._value_at = self.place + begin
        self._value += chunk[begin : min(end, begin + self._most_bytes + 1 - len(self._value))]

    def _ended(self, chunk: bytes, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        self._take(chunk, begin, end)
        if value := bytes(self._value).rstrip():
            yield self._value_at, value
        self._value.clear()


# A JSON line of a corpus as a value, in bounded memory.
#
# Parsed, ``{},{},...`` takes 26 times the memory of its text, and one emoji makes each character of a text take four
# bytes, in the line and in what is parsed of it. So a long line is counted first, and parsed from its bytes.

_SHORT_BYTES = 16 * 2**20
"""A line of this size is parsed as it is: that takes at most 610 MB."""
_MOST_VALUES = 2**19
"""Most values of a longer line."""


class BadLine(Exception):
    """A line that is not read; the message says why, for counting."""


def parse_line(line: bytes) -> Any:
    """Return the value of a JSON line. Parsing takes at most 610 MB for up to 64 MiB of text. In a short line, bytes that are
    not UTF-8 become U+FFFD.

    Raises:
        BadLine: it is not JSON, is nested too deeply, or is long and not UTF-8 or of many values.
    """
    try:
        if len(line) <= _SHORT_BYTES:
            return json.loads(line.decode("utf-8", errors="replace").strip())
        if most_values(line) <= _MOST_VALUES:
            return from_json(line, cache_strings="keys")
    except RecursionError:
        raise BadLine("nested too deeply") from None
    except ValueError:
        if len(line) <= _SHORT_BYTES:
            raise BadLine("not JSON") from None
    limits = f"not UTF-8 JSON of at most {_MOST_VALUES:,} values"
    raise BadLine(f"longer than {_SHORT_BYTES:,} bytes and {limits}")
