"""Follow a journal while it is written: each look reads only the bytes that are new.

Segments are only appended to, and one is complete when the next one of its term exists. So a look lists the journal, and reads
on in the segments that are not known to be complete.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

from springtide.errors import DamagedFile
from springtide.events import Event, event
from springtide.store import Folder
from springtide.track.segments import listed, name_of

_READ_BYTES = 8 * 2**20
"""Most bytes that are held at once."""
_LONGEST_LINE = 2**20
"""A line without an end that is longer is not an event: the rest of its segment is skipped."""
_OPEN_TERMS = 2
"""Newest terms whose last segments may still grow: an older driver writes nothing after two others have taken over."""
_log = logging.getLogger(__name__)


class JournalFollower:
    """Reads a run's journal on from where the last look ended."""

    def __init__(self, run: Folder) -> None:
        """``run``: the run's folder, local or at a store; it may not have a journal yet."""
        self._folder = run / "journal"
        self._read: dict[tuple[int, int], int] = {}
        """(term, number) of a segment -> bytes that were read of it."""
        self._complete: set[tuple[int, int]] = set()
        self.num_skipped = 0
        """Lines that are damaged or of another version, skipped so far; a warning is logged at the first."""

    def events(self) -> Iterator[Event]:
        """Yield the events since the last look, in the order of writing; a line that is not complete yet waits for the next
        look. Raises OSError if the store cannot be reached; the next look then goes on where this one ended."""
        there = listed(self._folder)
        last_of = dict(there)  # term -> its last segment: the list is sorted
        growing = {(term, last_of[term]) for term in sorted(last_of)[-_OPEN_TERMS:]}
        for segment in there:
            if segment in self._complete:
                continue
            yield from self._events_of(segment)
            if segment not in growing:
                self._complete.add(segment)

    def _events_of(self, segment: tuple[int, int]) -> Iterator[Event]:
        name = name_of(*segment)
        try:
            size = self._folder.size(name)
        except FileNotFoundError:
            return
        begin = self._read.get(segment, 0)
        while begin < size:
            try:
                part = bytes(self._folder.read_range(name, begin, min(size, begin + _READ_BYTES)))
            except (DamagedFile, FileNotFoundError, IsADirectoryError):
                return
            end = part.rfind(b"\n") + 1
            if not end:
                if len(part) > _LONGEST_LINE:
                    self._skip(name, "a line does not end")
                    self._read[segment] = size
                return
            for line in part[:end].split(b"\n")[:-1]:
                begin += len(line) + 1
                self._read[segment] = begin
                try:
                    found = event(json.loads(line))
                except (ValueError, RecursionError) as error:
                    self._skip(name, str(error)[:200])
                    continue
                yield found

    def _skip(self, name: str, why: str) -> None:
        self.num_skipped += 1
        if self.num_skipped == 1:
            _log.warning("%s: a line is skipped: %s; `springtide report` names all", self._folder.where(name), why)
