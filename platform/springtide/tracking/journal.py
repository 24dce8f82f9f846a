"""The journal: every event of a run, append-only, one JSON object per line. All other reports are made from this journal.

Storage errors never reach training. Events that the store does not accept are kept, and a thread retries with growing pauses.
The journal logs the first failure, and later that all events are stored again. A segment is one file of the journal. The driver
appends events to the newest segment, the open one:

    event --> open segment --local disk, no failure: written by the caller--> file
                    |
                    +--object store, or after a failure--> thread --> store     unsent events: in memory, then in local files

A restarted driver creates segments of its own and never writes to the segments of an earlier driver. So only the last line of a
segment can be incomplete, if its driver was killed. Readers skip an incomplete line.
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
"""Most lines of a segment (journal file) on an object store. Fewer than on a disk, because the whole open (newest) segment is
uploaded again every ten seconds."""
_PUT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_AWAITED_PAUSE_S = 1.0
_NEVER = float("inf")
_CLOSE_S = 30.0
"""How long the driver waits at the end of a run for a store that does not accept the journal, before it gives up [s]."""
_FULL_S = 1.0
"""How long the driver waits at the end of a run if the journal's disk is full [s]. Short, because waiting frees no space."""
_LINES_NAMED = 20
"""How many damaged lines of a segment (journal file) are logged one by one; the rest is logged as a count. In a file from
another version, every line may count as damaged."""
_SHOWN = 300
"""How many characters of the error about a damaged line are logged."""
_log = logging.getLogger(__name__)


class Journal:
    """An event listener that writes the journal. On a local disk, each event is written at once. An object store cannot append
    to a file, so a thread uploads the whole open segment (newest file) again: every ten seconds, and at once after every event
    that is not a step."""

    def __init__(
        self, run: Folder, enabled: bool = True, *, term: int = 0, say: Callable[[str], None] | None = None
    ) -> None:
        """Create the first segment (journal file) of this driver. Only this call raises the store's errors.

        ``enabled``: False on ranks other than rank 0, which write nothing. ``term``: number of the driver's lease (the right to
        write the run); 0: one above the highest number in the journal. ``say``: function that prints a line when storage fails
        and when it works again; called from any thread.
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
        """Time of the thread's next write to the store, by the monotonic clock [s]; infinite if no write is planned."""
        self._is_awaited = False
        """True while ``flush`` waits: the thread then retries a failed write after one second at most."""
        self._closing = False
        if not enabled:
            return
        self._segments, self._spool = Segments(self._folder, term), Spool()
        self.term = self._segments.term
        self._open = self._segments.first
        self._waiting: collections.deque[Segment] = collections.deque([self._open])
        """Closed segments (journal files) that are not fully stored, oldest first, then the open one, which gets new events."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Add one event, with the number of this driver's lease. Never raises a storage error. Waits for a write only if the
        journal is on a local disk."""
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
        """Wait until the store has all events added so far. Returns False if it does not within ``patience_s`` seconds."""
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
        """Store all events. Events that cannot be stored are written to local files, and their folder is printed. No event may
        be added afterwards."""
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
        """Write the open segment (newest journal file) in the calling thread. If that fails, the journal's thread retries."""
        try:
            self._segments.store(self._open, self._segments.wanted(self._open))
        except OSError as error:
            self._fail(error)
            self._want(_FIRST_PAUSE_S)

    def _want(self, after_s: float) -> None:
        """Wake the thread, so that it writes all unsent segments (journal files) within ``after_s`` seconds. If the last write
        failed, the planned time of its retry does not change."""
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
            except Exception as error:  # storage clients may raise any error: retry
                with self._changed:
                    self._fail(error)
                    self._puts_at_s = time.monotonic() + self._pause_s()
            else:
                with self._changed:
                    self._took(segment)

    def _next(self) -> Segment | None:
        """Wait until the next write is due. Return the oldest segment (journal file) that is not fully stored, or None if the
        journal is being closed."""
        with self._changed:
            while not self._closing:
                left_s = self._puts_at_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s if self._puts_at_s < _NEVER else None)
                    continue
                self._puts_at_s = _NEVER  # an event that arrives from now on, even during this write, sets a new time
                for segment in self._waiting:
                    if not segment.is_stored:
                        return segment
            return None

    def _took(self, segment: Segment) -> None:
        if segment.is_closed and segment.is_stored and segment in self._waiting:
            self._waiting.remove(segment)
            self._spool.release(segment)
        left = [one for one in self._waiting if not one.is_stored]
        # on an object store, unsent events in the open (newest) segment are no failure: they wait for the next upload
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
        """Write the events that the store did not accept to local files. A person can copy these files to the store later."""
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
            with contextlib.suppress(Exception):  # if printing fails, the journal's thread must not die
                self._say(text)


def _line(event: Event) -> bytes:
    """Return an event as a line of the journal. Passwords are redacted, because a ``reason`` may quote an error with a URL that
    contains one."""
    values = {key: redacted(value) if isinstance(value, str) else value for key, value in record(event).items()}
    # "replace": an event may contain a path that is not UTF-8. Its lone surrogates cannot be encoded, and would raise here
    return to_json({"format": FORMAT, **values}, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def read_journal(run: Folder) -> list[Event]:
    """Return every event of a run, in the order of writing.

    A last line that is incomplete because its driver was killed is skipped. Damaged lines, lines with another format number,
    and segments (journal files) that cannot be read are skipped with a warning. Events of a kind that only another version has
    are skipped, too; ``Timeline.unknown`` counts them. Raises OSError if the store cannot be reached.
    """
    return list(stream_journal(run))


def stream_journal(run: Folder) -> Iterator[Event]:
    """Yield the events of ``read_journal`` one by one. Use it for long runs: a list of millions of events needs much memory."""
    return _events(run / "journal")


_TOLD: set[tuple[str, int]] = set()
"""(file, line number) of damaged journal lines that this process has already warned about."""


def _events(folder: Folder) -> Iterator[Event]:
    for term, number in listed(folder):
        name = name_of(term, number)
        lines = read_segment(folder, name).split(b"\n")
        # drop the part after the last newline: empty, or an incomplete line (its driver was killed, or is still writing)
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
    """Yield (line number, event) of each line that holds an event. Events of a kind that this version lacks are skipped.
    Damaged lines are skipped with a warning.

    Args:
        segment: path of the segment, for the log.
        lines: (line number in the segment, from 1; the line's text) of each line to parse.
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
    """Return one event for each step that the run's current model was trained on, in order of steps. If a worker group started
    again from step s, earlier events of steps after s are dropped. Of several events of a step, the last one is returned."""
    steps: dict[int, StepDone] = {}
    later_start = math.inf
    """The lowest step from which a worker group started after the event ``one``."""
    for one in reversed(list(events)):
        if isinstance(one, Started):
            later_start = min(later_start, one.step)
        elif isinstance(one, StepDone) and one.step <= later_start:
            steps.setdefault(one.step, one)
    return [steps[step] for step in sorted(steps)]


def frame(events: Iterable[Event]) -> DataFrame:
    """Return the steps of ``last_steps`` as a pandas DataFrame, indexed by step."""
    import pandas as pd  # imported here, so that training does not load pandas

    steps = [{**(row := dataclasses.asdict(one)), **row.pop("extra")} for one in last_steps(events)]
    return pd.DataFrame(steps).set_index("step") if steps else pd.DataFrame()
