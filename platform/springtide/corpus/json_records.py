"""Split a ``.json`` file into its values, and parse JSON lines, both in bounded memory.

A file holds one array, whose elements are the values, or one or more consecutive objects. A value ends at its closing bracket,
so splitting a file scans only brackets, commas and quotes. The caller parses the values.
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
    """Yield (index of its first byte, its text) of each JSON value of a file. Also yield text that is not a value, so that the
    caller can report it.

    Args:
        most_bytes: a longer value is cut after ``most_bytes`` + 1 bytes, so that the caller sees that it is too long.
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
    """Splits a JSON file that is read in chunks. Its state is the value that began in earlier chunks and has not ended."""

    def __init__(self, most_bytes: int) -> None:
        self.place = 0
        """Index in the file of the first byte of the current chunk."""
        self._most_bytes = most_bytes
        self._value, self._value_at = bytearray(), 0
        self._depth = 0
        """Number of open brackets in the current value."""
        self._is_in_array = self._is_in_string = False

    def split(self, chunk: bytes) -> Generator[tuple[int, bytes], None, bytes]:
        """Yield the values that end in ``chunk``. If the chunk ends inside an escape sequence of a string, return the begun
        sequence, which the caller puts before the next chunk; otherwise return b""."""
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
        """Yield the unfinished value at the end of the file, if there is one. Then the file is cut or not JSON."""
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


# Parse a JSON line in bounded memory.
#
# Two dangers: when parsed, ``{},{},...`` takes 26 times the memory of its text; and one emoji makes Python store each character
# of a string in four bytes. So the values of a long line are counted before it is parsed, and it is parsed from its bytes,
# without decoding it to a string.

_SHORT_BYTES = 16 * 2**20
"""A line of up to this size [bytes] is parsed without counting its values, which takes at most 610 MB."""
_MOST_VALUES = 2**19
"""Maximum number of values in a line longer than ``_SHORT_BYTES``."""


class BadLine(Exception):
    """A line that cannot be used. The message is the reason under which reports count the line."""


def parse_line(line: bytes) -> Any:
    """Return the value of a JSON line. Parsing takes at most 610 MB for up to 64 MiB of text. In a line of up to
    ``_SHORT_BYTES``, bytes that are not UTF-8 become U+FFFD.

    Raises:
        BadLine: the line is not JSON or is nested too deeply. A line of more than ``_SHORT_BYTES`` also fails if it is not
            UTF-8 or has more than ``_MOST_VALUES`` values.
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
