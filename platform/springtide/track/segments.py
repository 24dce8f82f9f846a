"""The files of a journal: how they are named, written and kept until the store has them.

    <run>/journal/0002-0000.jsonl     the first segment of lease 2

A segment belongs to the journal that created its file, exclusively: nobody writes over another's. What the store does not
take stays in memory, and beyond a bound in files of the driver's temporary folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from springtide.store import Folder

_SEGMENT = re.compile(r"(\d{4,})-(\d{4,})\.jsonl")
_MEMORY_BYTES = 8 * 2**20
"""Of closed segments that wait in memory; more wait in files."""


def name_of(term: int, number: int) -> str:
    """The name of a segment."""
    return f"{term:04d}-{number:04d}.jsonl"


def listed(folder: Folder) -> list[tuple[int, int]]:
    """(lease, number) of every segment in a journal's folder, in the order they were written."""
    return sorted((int(match[1]), int(match[2])) for name in folder.names() if (match := _SEGMENT.fullmatch(name)))


@dataclasses.dataclass(eq=False)
class Segment:
    """Some lines, and how much of them the store has."""

    name: str = ""
    """Given when the file is created."""
    is_created: bool = False
    is_closed: bool = False
    data: bytearray = dataclasses.field(default_factory=bytearray)
    num_lines: int = 0
    stored_bytes: int = 0
    size_bytes: int = 0
    spooled: Path | None = None
    """The file that ``data`` has moved to."""

    def add(self, line: bytes) -> None:
        """Take one more line, which ends with a newline."""
        self.data += line
        self.num_lines += 1
        self.size_bytes += len(line)

    @property
    def is_stored(self) -> bool:
        return self.stored_bytes == self.size_bytes

    def content(self, begin: int = 0) -> bytes:
        """From a byte to its end."""
        return self.spooled.read_bytes()[begin:] if self.spooled else bytes(memoryview(self.data)[begin:])


class Segments:
    """Puts the segments of one lease into the journal's folder. Methods raise whatever the store raises."""

    def __init__(self, folder: Folder, term: int) -> None:
        """Create the first file. ``term`` 0 takes the next number that is free."""
        self._folder = folder
        there = listed(folder)
        self.term = term or 1 + max((one for one, _ in there), default=0)
        self._number = 1 + max((number for one, number in there if one == self.term), default=-1)
        self.first = Segment()
        while not self._create(self.first, b""):
            if not term:  # another start has taken it meanwhile
                self.term, self._number = self.term + 1, 0
        self._open: tuple[Segment, IO[bytes]] | None = None

    def wanted(self, segment: Segment) -> bytes:
        """What ``store`` is to be called with: a local file is appended to, an object is put whole."""
        return segment.content(segment.stored_bytes if self._folder.is_local else 0)

    def store(self, segment: Segment, wanted: bytes) -> None:
        """Have the store keep it. What was written before an error counts in ``segment.stored_bytes``."""
        if self._folder.is_local:
            self._append(segment, wanted)
            return
        if segment.is_created:
            self._folder.write(segment.name, wanted)
        else:
            while not self._create(segment, wanted):
                pass
        segment.stored_bytes = len(wanted)

    def named(self, segments: Iterable[Segment]) -> Iterator[tuple[str, Segment]]:
        """Each with the name that its file has or will have."""
        number = self._number
        for segment in segments:
            yield segment.name if segment.is_created else name_of(self.term, number), segment
            number += not segment.is_created

    def close(self) -> None:
        """Keep no file open."""
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open[1].close()
            self._open = None

    def _append(self, segment: Segment, rest: bytes) -> None:
        try:
            file, left = self._opened(segment), memoryview(rest)
            while left:  # a full disk may take a part of a line; the rest of it follows when there is room
                written = file.write(left)
                segment.stored_bytes += written
                left = left[written:]
        except OSError:
            self.close()
            raise

    def _opened(self, segment: Segment) -> IO[bytes]:
        if self._open is not None and self._open[0] is segment:
            return self._open[1]
        self.close()
        while not segment.is_created:
            self._create(segment, b"")
        try:
            descriptor = os.open(self._folder.where(segment.name), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._folder.exists():  # somebody has removed the file alone: all of it is written again
                segment.is_created, segment.stored_bytes = False, 0
                self._number -= 1
            raise
        self._open = segment, os.fdopen(descriptor, "ab", buffering=0)
        return self._open[1]

    def _create(self, segment: Segment, data: bytes) -> bool:
        """Name the segment and create its file with ``data``; False where the name is taken: the next call tries another."""
        segment.name = name_of(self.term, self._number)
        try:
            self._folder.create(segment.name, data)
        except FileExistsError:
            if self._folder.is_local and not self._folder.exists(segment.name):
                raise  # the folder itself is a file
            # a put whose answer was lost finds what it wrote; lines may have come since
            if not data or not data.startswith(found := self._folder.read(segment.name)) or not found:
                self._number += 1
                return False
            self._folder.write(segment.name, data)
        segment.is_created = True
        self._number += 1
        return True


class Spool:
    """Where segments wait that fill the memory: files in a temporary folder of the driver's machine."""

    def __init__(self) -> None:
        self.folder: Path | None = None

    def relieve(self, waiting: Iterable[Segment]) -> None:
        """Move closed segments to files until the others fit in memory. Where that fails they stay."""
        closed = [segment for segment in waiting if segment.is_closed and segment.spooled is None]
        size = sum(segment.size_bytes for segment in closed)
        with contextlib.suppress(OSError):
            for number, segment in enumerate(closed):
                if size <= _MEMORY_BYTES:
                    return
                self._move(segment, f"{number}-{id(segment):x}.waiting")
                size -= segment.size_bytes

    def release(self, segment: Segment) -> None:
        """The store has it."""
        if segment.spooled is not None:
            segment.spooled.unlink(missing_ok=True)

    def leave(self, segments: Iterable[tuple[str, Segment]]) -> Path:
        """Write segments under the given names, to be found by a person. OSError where that fails."""
        for name, segment in segments:
            with contextlib.suppress(FileNotFoundError):  # somebody has cleaned the temporary folder
                content = segment.content()
                (self._made() / name).write_bytes(content)
                self.release(segment)
        return self._made()

    def remove(self) -> None:
        """Nothing is left to wait."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def _move(self, segment: Segment, name: str) -> None:
        path = self._made() / name
        path.write_bytes(segment.data)
        segment.spooled, segment.data = path, bytearray()

    def _made(self) -> Path:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="springtide-journal-"))
        return self.folder
