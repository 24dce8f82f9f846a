"""The segments (files) of a run's journal: how they are named, written, and kept until the store has them.

    <run>/journal/0002-0000.jsonl     the first segment of lease 2

A lease is a driver's exclusive right to write the run; its number is the term. Each driver creates its own segments with an
exclusive create, so no driver overwrites a segment of another driver. Writing does not check the lease: a driver that has lost
its lease continues to write segments of its old term. This is harmless. Readers sort segments by term. The newer driver's
``Started`` event makes them discard all steps after the step from which it resumed. Discarded steps are kept only as repeated
executions (tries). Segments that the store does not accept stay in memory, and above a limit in temporary local files.
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

from springtide.storage import Folder
from springtide.storage.errors import explain_full_disk, is_full

_SEGMENT = re.compile(r"(\d{4,})-(\d{4,})\.jsonl")
_MEMORY_BYTES = 8 * 2**20
"""Most bytes of closed segments (full journal files) that wait in memory for the store. The rest waits in local files."""


def name_of(term: int, number: int) -> str:
    """Return the file name of a journal segment. ``term``: number of the driver's lease; ``number``: the segment's number."""
    return f"{term:04d}-{number:04d}.jsonl"


def listed(folder: Folder) -> list[tuple[int, int]]:
    """Return (number of the driver's lease, number of the segment) of every segment in the folder of a journal. They are sorted
    by both numbers, which is the order of writing."""
    matches = map(_SEGMENT.fullmatch, folder.names())
    return sorted((int(match[1]), int(match[2])) for match in matches if match)


@dataclasses.dataclass(eq=False)
class Segment:
    """Lines of a journal that belong into one file, and how many of their bytes the store has."""

    name: str = ""
    """Name of the segment's file, set when the file is created."""
    is_created: bool = False
    is_closed: bool = False
    data: bytearray = dataclasses.field(default_factory=bytearray)
    num_lines: int = 0
    stored_bytes: int = 0
    size_bytes: int = 0
    spooled: Path | None = None
    """Temporary local file to which ``data`` was moved to free memory; None while the data is in memory."""

    def add(self, line: bytes) -> None:
        """Add a line of the journal. ``line`` must end with a newline."""
        self.data += line
        self.num_lines += 1
        self.size_bytes += len(line)

    @property
    def is_stored(self) -> bool:
        return self.stored_bytes == self.size_bytes

    def content(self, begin: int = 0) -> bytes:
        """Return the segment's bytes from ``begin`` to the end, from memory or from the temporary file."""
        return self.spooled.read_bytes()[begin:] if self.spooled else bytes(memoryview(self.data)[begin:])


class Segments:
    """Writes the segments (journal files) of one driver into the journal's folder. Methods raise the store's errors."""

    def __init__(self, folder: Folder, term: int) -> None:
        """Create the file of the first segment. ``term``: number of the driver's lease; 0: use the lowest number above all that
        the journal contains."""
        self._folder = folder
        there = listed(folder)
        self.term = term or 1 + max((one for one, _ in there), default=0)
        self._number = 1 + max((number for one, number in there if one == self.term), default=-1)
        self.first = Segment()
        while not self._create(self.first, b""):
            if not term:  # another driver has just taken this term: try the next one
                self.term, self._number = self.term + 1, 0
        self._open: tuple[Segment, IO[bytes]] | None = None

    def wanted(self, segment: Segment) -> bytes:
        """Return the bytes of a segment that ``store`` must write: for a local file only the unstored bytes, for an object
        store all bytes, because it cannot append."""
        return segment.content(segment.stored_bytes if self._folder.is_local else 0)

    def store(self, segment: Segment, wanted: bytes) -> None:
        """Write ``wanted``, the bytes from the method ``wanted``, to the store. If the write fails halfway,
        ``segment.stored_bytes`` counts the bytes that were written."""
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
        """Yield (file name, segment) of each segment. A segment without a file gets the name that its file would have."""
        number = self._number
        for segment in segments:
            yield segment.name if segment.is_created else name_of(self.term, number), segment
            number += not segment.is_created

    def close(self) -> None:
        """Close the open file; do nothing if no file is open."""
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open[1].close()
            self._open = None

    def _append(self, segment: Segment, rest: bytes) -> None:
        try:
            file, left = self._opened(segment), memoryview(rest)
            while left:  # a full disk may accept only part of a line: count what was written, and write the rest later
                written = file.write(left)
                segment.stored_bytes += written
                left = left[written:]
        except OSError as error:
            self.close()
            if not is_full(error):
                raise
            raise explain_full_disk(
                error, self._folder.where(segment.name), segment.size_bytes - segment.stored_bytes
            ) from error

    def _opened(self, segment: Segment) -> IO[bytes]:
        if self._open is not None and self._open[0] is segment:
            return self._open[1]
        self.close()
        while not segment.is_created:
            self._create(segment, b"")
        try:
            descriptor = os.open(self._folder.where(segment.name), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._folder.exists():  # if only the file is gone, the next try creates it again, with all lines
                segment.is_created, segment.stored_bytes = False, 0
                self._number -= 1
            raise
        self._open = segment, os.fdopen(descriptor, "ab", buffering=0)
        return self._open[1]

    def _create(self, segment: Segment, data: bytes) -> bool:
        """Give the segment a name and create its file with ``data``. Returns False if another driver has a file of that name.
        The next call then tries the next name."""
        segment.name = name_of(self.term, self._number)
        try:
            self._folder.create(segment.name, data)
        except FileExistsError:
            if self._folder.is_local and not self._folder.exists(segment.name):
                raise  # no file has this name, so the error is about the journal's folder: it is a file
            # a file has this name. If its content is the start of ``data``, an earlier try created it, but the response was
            # lost: overwrite it, because ``data`` may have grown. Otherwise it is another driver's file: try the next number
            if not data or not data.startswith(found := self._folder.read(segment.name)) or not found:
                self._number += 1
                return False
            self._folder.write(segment.name, data)
        segment.is_created = True
        self._number += 1
        return True


class Spool:
    """A temporary folder on the driver's machine. It holds journal segments that wait for the store and exceed the memory
    limit."""

    def __init__(self) -> None:
        self.folder: Path | None = None

    def relieve(self, waiting: Iterable[Segment]) -> None:
        """Move closed segments from memory to temporary files until the rest fits the memory limit. Segments that cannot be
        written stay in memory."""
        closed = [segment for segment in waiting if segment.is_closed and segment.spooled is None]
        size = sum(segment.size_bytes for segment in closed)
        with contextlib.suppress(OSError):
            for number, segment in enumerate(closed):
                if size <= _MEMORY_BYTES:
                    return
                self._move(segment, f"{number}-{id(segment):x}.waiting")
                size -= segment.size_bytes

    def release(self, segment: Segment) -> None:
        """Remove a segment's temporary file, once its content is stored elsewhere."""
        if segment.spooled is not None:
            segment.spooled.unlink(missing_ok=True)

    def leave(self, segments: Iterable[tuple[str, Segment]]) -> Path:
        """Write unsent segments to local files, which a person can copy to the store. ``segments``: (file name to use,
        segment). Returns the folder of the files. Raises OSError."""
        for name, segment in segments:
            with contextlib.suppress(FileNotFoundError):  # another program removed the temporary file: skip it
                content = segment.content()
                (self._made() / name).write_bytes(content)
                self.release(segment)
        return self._made()

    def remove(self) -> None:
        """Remove the temporary folder if it is empty."""
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
