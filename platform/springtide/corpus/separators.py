"""Documents of a text file that holds several, between separators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from springtide.config.data import BLANK_LINE


def split(
    lines: Iterable[tuple[int, bytes]], separator: str, begin: int, end: int, most_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the documents of a range of a file, each with the place of the line it begins in, without line breaks around it.

    A document belongs to the range in which the line of the separator before it begins; the first of a file to that from 0.

    Args:
        lines: the file from the first line on that begins in the range: the place of each line, and its bytes; a very long
            line in pieces, of which each has the line's place.
        separator: text that separates documents, or ``blank_line``.
        begin: first byte of the range.
        end: its end; -1 is that of the file.
        most_bytes: of a document that is longer, the first ``most_bytes`` + 1 bytes are yielded.
    """
    mark = separator.encode()
    found, place, is_here, rest = bytearray(), 0, begin == 0, b""
    line_at = -1
    for at, line in lines:
        is_blank = at != line_at and line.endswith(b"\n") and not line.strip()
        line_at = at
        if separator == BLANK_LINE:
            parts = [b"", b""] if is_blank else [line]
        else:
            *parts, last = (rest + line).split(mark)
            cut = len(last) if line.endswith(b"\n") else max(0, len(last) - len(mark) + 1)
            rest = last[cut:]  # a separator may go on in the next piece of the line
            parts.append(last[:cut])
        for number, part in enumerate(parts):
            if number:
                if is_here and (text := bytes(found).strip(b"\r\n")):
                    yield place, text
                if 0 <= end <= at:
                    return
                found, place, is_here = bytearray(), at, True
            if is_here:
                found += part[: max(0, most_bytes + 1 - len(found))]
    if is_here and (text := bytes(found + rest).strip(b"\r\n")):
        yield place, text
