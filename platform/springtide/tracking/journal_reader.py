"""Read a journal (file of a run's events) while the run writes it. Each read fetches only new bytes, and parses only complete
lines."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from springtide.events import Event, StepDone
from springtide.storage import Folder
from springtide.tracking.journal import parse_lines, read_segment
from springtide.tracking.segments import listed, name_of
from springtide.tracking.timeline import StepColumns, Timeline, columns_of, joined, parse_steps

_GROWING_TERMS = 8
"""How many of the run's newest drivers can still add to their last journal file, which is therefore read again. A driver that
was replaced may still store events that the store had refused before."""
_PART_BYTES = 64 * 2**20
"""Most bytes of a segment (journal file) that one call of ``read`` fetches, except the first, which fetches the whole file."""
_THREADS = min(8, os.cpu_count() or 1)
_STEP = b'"kind": "step"'
"""Text in the journal line of every step, and in no other line: quotes inside a value would be escaped with a backslash."""


@dataclasses.dataclass
class _Part:
    """What was read so far of one segment (journal file)."""

    size_bytes: int = 0
    """Number of bytes read, from the file's start to the end of the last complete line."""
    num_lines: int = 0
    steps: StepColumns = dataclasses.field(default_factory=lambda: columns_of([]))
    placed: list[tuple[int, Event]] = dataclasses.field(default_factory=list)
    """(number of steps before the event in the same journal file, event) of each event that is not a step."""
    unknown: Counter[str] = dataclasses.field(default_factory=Counter)
    """Kind of event that this version does not know -> number of such events."""


class _Told(NamedTuple):
    """How much of a segment (journal file) ``JournalReader.new`` has returned so far: number of bytes, of steps, and of other
    events."""

    size_bytes: int
    steps: int
    events: int


class JournalReader:
    """Reads the journal of a live run in parts, as it grows."""

    def __init__(self, run: Folder) -> None:
        """``run``: the run's folder. Reads nothing yet."""
        self._folder = run / "journal"
        self._parts: dict[tuple[int, int], _Part] = {}
        self._closed: set[tuple[int, int]] = set()
        self._fresh: list[_Part] = []
        """What the last read added, for each segment (journal file) that has grown."""
        self._told: dict[tuple[int, int], _Told] = {}
        """How much of each segment (journal file) ``new`` has returned so far. Only a successful read changes these counts."""

    def read(self) -> bool:
        """Read the new part of the journal. Return True if anything was added. Raises OSError if the store cannot be reached.
        An error loses nothing: after the next successful read, ``new`` has all additions since the last successful read."""
        there = listed(self._folder)
        last = dict(there)  # ``there`` is sorted, so this keeps the last segment of each driver (term)
        growing = set(sorted(last)[-_GROWING_TERMS:])
        wanted = [one for one in there if one not in self._closed]
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(self._take, wanted))
        self._closed |= {(term, number) for term, number in wanted if number != last[term] or term not in growing}
        self._fresh = []
        for one, part in sorted(self._parts.items()):  # also segments that only a failed earlier read added to
            before = self._told.get(one, _Told(0, 0, 0))
            self._told[one] = now = _Told(part.size_bytes, len(part.steps), len(part.placed))
            if now != before:
                placed = [(at - before.steps, event) for at, event in part.placed[before.events :]]
                self._fresh.append(_Part(steps=part.steps.take(slice(before.steps, None)), placed=placed))
        return bool(self._fresh)

    @property
    def new(self) -> Timeline:
        """The steps and events that the last call of ``read`` added."""
        return _timeline(self._fresh)

    @functools.cached_property
    def timeline(self) -> Timeline:
        """All steps and events that were read so far."""
        return _timeline([part for _, part in sorted(self._parts.items())])

    def _take(self, segment: tuple[int, int]) -> None:
        """Read the new complete lines of one segment (journal file). Called in a thread of a pool."""
        name, part = name_of(*segment), self._parts.setdefault(segment, _Part())
        data = self._new_bytes(name, part)
        whole = data.rfind(b"\n") + 1  # the bytes after it are an incomplete line, which the driver is still writing
        if not whole:
            return
        lines = data[:whole].split(b"\n")[:-1]
        steps, placed, unknown = _parsed(self._folder.where(name), part.num_lines, lines)
        part.unknown += unknown
        part.placed += [(len(part.steps) + at, event) for at, event in placed]
        part.steps = joined([part.steps, steps]) if len(part.steps) else steps
        part.size_bytes += whole
        part.num_lines += len(lines)
        self.__dict__.pop("timeline", None)

    def _new_bytes(self, name: str, part: _Part) -> bytes:
        if not part.size_bytes:
            return read_segment(self._folder, name)
        try:
            size = self._folder.size(name)
            if size <= part.size_bytes:
                return b""
            end = min(size, part.size_bytes + _PART_BYTES)
            return bytes(self._folder.read_range(name, part.size_bytes, end))
        except FileNotFoundError:  # the file was removed after it was listed: keep what was read before
            return b""


def _timeline(parts: Sequence[_Part]) -> Timeline:
    placed, before = [], 0
    for part in parts:
        placed += [(before + at, event) for at, event in part.placed]
        before += len(part.steps)
    unknown = sum((part.unknown for part in parts), Counter[str]())
    return Timeline(joined([part.steps for part in parts]), placed, unknown)


def _parsed(segment: str, before: int, lines: list[bytes]) -> tuple[StepColumns, list[tuple[int, Event]], Counter[str]]:
    """Parse complete lines of a journal file. Return the steps, (number of steps before the event, event) of every other event,
    and the number of events of each kind that this version does not know.

    Args:
        segment: path of the segment, for the log.
        before: number of lines of the segment that earlier calls have parsed.
        lines: text of each line, without its newline.
    """
    steps, others, steps_before = list[bytes](), dict[int, bytes](), dict[int, int]()
    for at, line in enumerate(lines, before + 1):
        if _STEP in line:
            steps.append(line)
        else:
            others[at], steps_before[at] = line, len(steps)
    columns = parse_steps(steps)
    unknown = Counter[str]()
    if columns is not None:
        placed = [(steps_before[at], event) for at, event in parse_lines(segment, others.items(), unknown)]
        if not any(isinstance(event, StepDone) for _, event in placed):
            return columns, placed, unknown
    # some step's line differs from what a run writes, so the fast parser refused all steps: parse each line on its own
    values, placed = list[StepDone](), list[tuple[int, Event]]()
    unknown = Counter[str]()
    for _, event in parse_lines(segment, enumerate(lines, before + 1), unknown):
        if isinstance(event, StepDone):
            values.append(event)
        else:
            placed.append((len(values), event))
    return columns_of(values), placed, unknown
