"""The rows of a CSV or TSV file, in bounded memory. A quoted cell may hold line breaks, so a file is read from its start."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from typing import IO

_MOST_CELLS = 2**16
"""Most cells of a row [cells]: an empty one takes one byte of the file and eight of memory."""


class BadTable(Exception):
    """A file that cannot be read on. Arguments: what is wrong, and the remedy."""


def read_rows(file: IO[bytes], delimiter: str, most_bytes: int) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the first byte of each row, and its cells, or why it cannot be read. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        BadTable: a row of more than ``most_bytes``, as where a quote is never closed, or of more than 65,536 cells.
    """
    csv.field_size_limit(max(csv.field_size_limit(), most_bytes))  # of the process; by default 128 KiB
    lines = _Lines(file, delimiter.encode(), most_bytes)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        place = lines.begin_row()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield place, f"not CSV ({error})"
            continue
        if row:
            yield place, row


class _Lines:
    """The lines of a file as texts, no more of them for a row than it may hold."""

    def __init__(self, file: IO[bytes], delimiter: bytes, most_bytes: int) -> None:
        self._file, self._delimiter, self._most_bytes = file, delimiter, most_bytes
        self._place = self._begin = 0

    def begin_row(self) -> int:
        """Return the place of the row that begins here."""
        self._begin = self._place
        return self._begin

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        left = self._most_bytes - (self._place - self._begin)
        line = self._file.readline(left + 1)
        if not line:
            raise StopIteration
        if len(line) > left:
            problem = f"the row at byte {self._begin:,} is longer than {self._most_bytes:,} bytes"
            raise BadTable(problem, "close its quotes, or write JSON lines or Parquet")
        if b'"' not in line and line.count(self._delimiter) >= _MOST_CELLS:
            raise BadTable(
                f"the row at byte {self._begin:,} has more than {_MOST_CELLS:,} cells", "check its delimiter"
            )
        self._place += len(line)
        return (line if self._place > len(line) else line.removeprefix(codecs.BOM_UTF8)).decode("utf-8", "replace")
