"""The journal: every event of a run, append-only, one JSON object per line. All other reports are made from this journal.

Storage errors never reach training. Events that the store does not accept are kept, and a thread retries with growing pauses.
The journal prints the first failure, and later that all events are stored again. A segment is one file of the journal:

    event --> open segment --local disk, no failure: written by the caller--> file
                    |
                    +--object store, or after a failure--> thread --> store     unsent events: in memory, then in local files

A restarted driver never writes to the segments of an earlier driver. So only the last line of a segment can be cut short (by a
kill); readers skip such a line.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Self

from springtide.errors import DamagedFile, redacted
from springtide.events import Event, Started, StepDone, event, record
from springtide.events.record import FORMAT, UnknownKind
from springtide.storage import Folder, to_json
from springtide.storage.errors import is_full
from springtide.tracking.segments import Segment, Segments, Spool, listed, name_of

if TYPE_CHECKING:
    from pandas import DataFrame

_SEGMENT_LINES = 10_000
_SEGMENT_LINES_PUT = 2_000
"""Lines of a segment (journal file) on an object store. Fewer than on a disk, because the whole open segment is uploaded again
every ten seconds."""
_PUT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_AWAITED_PAUSE_S = 1.0
_NEVER = float("inf")
_CLOSE_S = 30.0
"""How long the end of a run waits for a store that does not accept the journal [s]."""
_FULL_S = 1.0
"""How long the end of a run waits if the disk for the journal is full [s]. Short, because a full disk does not empty itself."""
_LINES_NAMED = 20
"""Most damaged lines of a segment (journal file) that are logged one by one. In a file of another version, every line may count
as damaged."""
_SHOWN = 300
"""Most characters of an error about a damaged line that are logged."""
_log = logging.getLogger(__name__)


class Journal:
    """An event listener that writes the journal. On a local disk each event is written at once. An object store cannot append
    to a file. There a thread rewrites the open segment (newest file) every ten seconds, and after every event that is not a
    step."""

    def __init__(
        self, run: Folder, enabled: bool = True, *, term: int = 0, say: Callable[[str], None] | None = None
    ) -> None:
        """Create the first segment (journal file) of this driver. Only this call raises the store's errors.

        ``enabled``: False on ranks that do not write. ``term``: number of the driver's lease on the run; 0: one above the
        numbers of all earlier segments. ``say``: receives a line when storage fails and when it works again, from any thread.
        """
        self._folder, self._enabled, self._say = run / "journal", enabled, say
        self.term = term or 1
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._problem = ""
        """Why the last write to the store failed; empty if it succeeded."""
        self._is_full = False
        """True if the last write failed because the disk is full."""
        self._failed_tries = 0
        self._puts_at_s = _NEVER
        """Time at which the thread next writes to the store, by the monotonic clock [s]."""
        self._is_awaited = False
        """True while ``flush`` waits: the thread then retries a failed write sooner."""
        self._closing = False
        if not enabled:
            return
        self._segments, self._spool = Segments(self._folder, term), Spool()
        self.term = self._segments.term
        self._open = self._segments.first
        self._waiting: collections.deque[Segment] = collections.deque([self._open])
        """The open segment, and closed segments that are not fully stored, oldest first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Add one event, marked with the number of this driver's lease. Never raises a storage error, and blocks only for a
        local disk."""
        if not self._enabled:
            return
        line = _line(dataclasses.replace(event, term=self.term))
        with self._changed:
            if self._open.num_lines >= self._most_lines:
                self._next_segment()
            self._open.add(line)
            if self._folder.is_local and not self._problem:
                self._write_here()
            elif not isinstance(event, StepDone):
                self._want(0.0)
            elif self._puts_at_s == _NEVER:
                self._want(_PUT_S)

    def flush(self, patience_s: float = _CLOSE_S) -> bool:
        """Wait until the store has every event so far; returns False if that takes longer than ``patience_s``."""
        if not self._enabled:
            return True
        with self._changed:
            if not self._is_whole():
                self._puts_at_s = 0.0
                self._start()
            self._is_awaited = True
            try:
                is_whole = self._changed.wait_for(self._is_whole, min(patience_s, _FULL_S))
                if is_whole or self._is_full:
                    return is_whole
                return self._changed.wait_for(self._is_whole, max(0.0, patience_s - _FULL_S))
            finally:
                self._is_awaited = False

    def close(self) -> None:
        """Store all events, or leave events that cannot be stored in local files and print where. No event may be added
        afterwards."""
        if not self._enabled or self._closing:
            return
        is_whole = self.flush(_CLOSE_S)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if not is_whole:
                self._leave_behind()
        if self._thread is not None and is_whole:
            self._thread.join()
        if self._thread is None or is_whole:
            self._segments.close()
        self._spool.remove()

    @property
    def _most_lines(self) -> int:
        """Number of lines after which a segment (journal file) is closed and the next one begins."""
        return _SEGMENT_LINES if self._folder.is_local else min(_SEGMENT_LINES, _SEGMENT_LINES_PUT)

    def _next_segment(self) -> None:
        self._open.is_closed = True
        if self._open.is_stored:
            self._waiting.remove(self._open)
        self._open = Segment()
        self._waiting.append(self._open)
        self._spool.relieve(self._waiting)

    def _write_here(self) -> None:
        """Write the open segment in the caller's thread. After a failure the journal's thread takes over."""
        try:
            self._segments.store(self._open, self._segments.wanted(self._open))
        except OSError as error:
            self._fail(error)
            self._want(_FIRST_PAUSE_S)

    def _want(self, after_s: float) -> None:
        """Have the thread write all unsent segments (journal files) to the store within ``after_s``. After a failed write, the
        time of the next retry is kept."""
        if not self._problem or self._puts_at_s == _NEVER:
            self._puts_at_s = min(self._puts_at_s, time.monotonic() + after_s)
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="springtide-journal", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _is_whole(self) -> bool:
        return all(segment.is_stored for segment in self._waiting)

    def _work(self) -> None:
        while (segment := self._next()) is not None:
            try:
                with self._changed:
                    wanted = self._segments.wanted(segment)
                self._segments.store(segment, wanted)
            except Exception as error:  # a store may raise any error of its client
                with self._changed:
                    self._fail(error)
                    self._puts_at_s = time.monotonic() + self._pause_s()
            else:
                with self._changed:
                    self._took(segment)

    def _next(self) -> Segment | None:
        """Wait until the time of the next write. Return the oldest segment (journal file) that is not fully stored; None if the
        journal is being closed."""
        with self._changed:
            while not self._closing:
                left_s = self._puts_at_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s if self._puts_at_s < _NEVER else None)
                    continue
                self._puts_at_s = _NEVER  # an event that arrives during the write sets a new time
                for segment in self._waiting:
                    if not segment.is_stored:
                        return segment
            return None

    def _took(self, segment: Segment) -> None:
        if segment.is_closed and segment.is_stored and segment in self._waiting:
            self._waiting.remove(segment)
            self._spool.release(segment)
        left = [one for one in self._waiting if not one.is_stored]
        # on an object store, unsent events of the open segment are normal: they wait for the next upload
        is_behind = bool(left) and (self._folder.is_local or left[0] is not self._open)
        if is_behind or (left and self._is_awaited):
            self._puts_at_s = 0.0
        if self._problem and not is_behind:
            self._problem, self._is_full, self._failed_tries = "", False, 0
            self._tell(f"the journal in {self._folder.url} is whole again")
        self._changed.notify_all()

    def _pause_s(self) -> float:
        longest_s = _AWAITED_PAUSE_S if self._is_awaited else _LONGEST_PAUSE_S
        return random.uniform(0.5, 1.0) * min(longest_s, _FIRST_PAUSE_S * 2.0 ** (self._failed_tries - 1))

    def _fail(self, error: Exception) -> None:
        self._failed_tries += 1
        if not self._problem:
            self._tell(
                f"the journal cannot be written to {self._folder.url} ({error}); training continues, its events are kept"
            )
        self._problem, self._is_full = str(error) or type(error).__name__, is_full(error)

    def _leave_behind(self) -> None:
        """Write the events that the store did not accept to local files, which a person can copy to the store later."""
        left = [segment for segment in self._waiting if not segment.is_stored]
        lines = sum(segment.num_lines for segment in left)
        try:
            where = self._spool.leave(self._segments.named(left))
        except OSError as error:
            self._tell(
                f"EVENTS ARE LOST: neither {self._folder.url} nor this machine's disk accepts the journal ({error})"
            )
            return
        self._tell(
            f"the journal could not be written to {self._folder.url} ({self._problem}): {lines} events are in {where}; "
            f"copy its files into {self._folder.url} when it can be written, and overwrite those of the same name"
        )

    def _tell(self, text: str) -> None:
        text = redacted(text)
        _log.warning("%s", text)
        if self._say is not None:
            with contextlib.suppress(Exception):  # printing may fail; the journal's thread must go on
                self._say(text)


def _line(event: Event) -> bytes:
    """Return an event as a line of the journal. Passwords are redacted, because ``reason`` fields quote error messages with
    URLs."""
    values = {key: redacted(value) if isinstance(value, str) else value for key, value in record(event).items()}
    # "replace": a path that is not UTF-8 contains a lone surrogate, which cannot be encoded
    return to_json({"format": FORMAT, **values}, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def read_journal(run: Folder) -> list[Event]:
    """Return every event of a run, in the order of writing.

    A last line that a kill cut short is skipped. Damaged lines, lines of another format, and segments (journal files) that
    cannot be read are skipped with a warning. Events of unknown kinds are skipped, too; ``Timeline.unknown`` counts them.
    Raises OSError if the store cannot be reached.
    """
    return list(stream_journal(run))


def stream_journal(run: Folder) -> Iterator[Event]:
    """Yield the events of ``read_journal`` one by one, because a long run has millions of events."""
    return _events(run / "journal")


_TOLD: set[tuple[str, int]] = set()
"""(file, line number) of damaged journal lines that this process has already warned about."""


def _events(folder: Folder) -> Iterator[Event]:
    for term, number in listed(folder):
        name = name_of(term, number)
        lines = read_segment(folder, name).split(b"\n")
        # drop the part after the last newline: it is empty, or a line that the writer could not finish
        yield from (one for _, one in parse_lines(folder.where(name), enumerate(lines[:-1], 1)))


def read_segment(folder: Folder, name: str) -> bytes:
    """Return the bytes of a segment (journal file). If it cannot be read, log a warning and return empty bytes."""
    try:
        return folder.read(name)
    except (DamagedFile, FileNotFoundError, IsADirectoryError) as error:
        _warn(folder.where(name), "it is skipped", 0, error)
        return b""


def parse_lines(
    segment: str, lines: Iterable[tuple[int, bytes]], unknown: collections.Counter[str] | None = None
) -> Iterator[tuple[int, Event]]:
    """Yield (line number, event) of each line that holds an event. Events of unknown kinds are skipped. Damaged lines are
    skipped with a warning.

    Args:
        segment: path of the segment, for the log.
        lines: (line number in the segment, from 1; text of the line) of each line.
        unknown: kind of event -> count; increased by the number of skipped events of each unknown kind.
    """
    damaged = 0
    for at, line in lines:
        try:
            yield at, event(json.loads(line))
        except UnknownKind as error:
            if unknown is not None:
                unknown[error.kind] += 1
        except (ValueError, RecursionError) as error:
            damaged += 1
            if damaged <= _LINES_NAMED:
                _warn(segment, f"line {at} is skipped", at, error)
    if damaged > _LINES_NAMED:
        rest = ValueError("as above")
        _warn(segment, f"{damaged - _LINES_NAMED} more lines are skipped", -damaged, rest)


def _warn(segment: str, skipped: str, line: int, error: Exception) -> None:
    if (segment, line) in _TOLD:
        return
    _TOLD.add((segment, line))
    _log.warning(
        "%s: %s: damaged, or from another version of springtide (%s: %s); restore the file from a copy, or remove the damage",
        segment,
        skipped,
        type(error).__name__,
        str(error)[:_SHOWN],
    )


def last_steps(events: Iterable[Event]) -> list[StepDone]:
    """Return one event for each step that the run's current model was trained on, in order. A restart from an earlier step
    discards the steps trained after that step. If a step was then trained more than once, its last execution is returned."""
    steps: dict[int, StepDone] = {}
    later_start = math.inf
    """The lowest step at which a worker group started after the event."""
    for one in reversed(list(events)):
        if isinstance(one, Started):
            later_start = min(later_start, one.step)
        elif isinstance(one, StepDone) and one.step <= later_start:
            steps.setdefault(one.step, one)
    return [steps[step] for step in sorted(steps)]


def frame(events: Iterable[Event]) -> DataFrame:
    """Return the steps of ``last_steps`` as a pandas DataFrame, indexed by step."""
    import pandas as pd  # imported here, because training does not need it

    steps = [{**(row := dataclasses.asdict(one)), **row.pop("extra")} for one in last_steps(events)]
    return pd.DataFrame(steps).set_index("step") if steps else pd.DataFrame()
