"""Split a ``.json`` file into its values, and parse JSON lines, both in bounded memory.

A file holds the elements of an array, a pretty-printed object, or consecutive objects. A value ends at its closing bracket, so
splitting scans only brackets, commas and quotes. The caller parses the values.
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
    """Yield the first byte and the text of each value of a file. Text that is not a value is also yielded, and will not parse.

    Args:
        most_bytes: a longer value is cut after ``most_bytes`` + 1 bytes.
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
    """State of the splitting of a JSON file, which is read in chunks: the value that the current chunk has not ended."""

    def __init__(self, most_bytes: int) -> None:
        self.place = 0
        """First byte of the current chunk in the file."""
        self._most_bytes = most_bytes
        self._value, self._value_at = bytearray(), 0
        self._depth = 0
        """Number of open brackets in the current value."""
        self._is_in_array = self._is_in_string = False

    def split(self, chunk: bytes) -> Generator[tuple[int, bytes], None, bytes]:
        """Yield the values that end in ``chunk``; return the incomplete escape at its end, which the caller puts before the
        next chunk."""
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
        """Yield the unfinished value at the end of the file, which exists only if the file is cut or not JSON."""
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
# Parsed, ``{},{},...`` takes 26 times the memory of its text. One emoji makes each character of a text take four bytes, both
# in the line and in the parsed value. So the values of a long line are counted first, and it is parsed from its bytes.

_SHORT_BYTES = 16 * 2**20
"""A line of up to this size is parsed directly, which takes at most 610 MB."""
_MOST_VALUES = 2**19
"""Most values in a line longer than ``_SHORT_BYTES``."""


class BadLine(Exception):
    """A line that is not used. The message is the reason under which it is counted."""


def parse_line(line: bytes) -> Any:
    """Return the value of a JSON line. Parsing takes at most 610 MB for up to 64 MiB of text. In a short line, bytes that are
    not UTF-8 become U+FFFD.

    Raises:
        BadLine: the line is not JSON or nested too deeply; or it is long, and either not UTF-8 or has too many values.
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
