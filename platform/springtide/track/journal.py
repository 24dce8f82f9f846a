"""The journal: every event of a run, append-only, one JSON object a line. All other reports are made from it.

Storage trouble never reaches training. What the store does not take is kept, tried again in a thread with growing pauses, told
once, and told when it is whole again:

    event --> open segment --local disk, no trouble: written by the caller--> file
                    |
                    +--object store, or trouble--> thread --> store         waiting: memory, then files of the driver

A start never touches another's segments, so a torn line can only be a segment's last and is left out when read.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from springtide.errors import redacted
from springtide.events import Event, StepDone, event, record
from springtide.store import Folder
from springtide.track.segments import Segment, Segments, Spool, listed, name_of

_SEGMENT_LINES = 10_000
_PUT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_AWAITED_PAUSE_S = 1.0
_NEVER = float("inf")
_CLOSE_S = 30.0
"""How long the end of a run waits for a store that does not take its journal."""
_log = logging.getLogger(__name__)


class Journal:
    """A listener that writes. On a local disk every event is with the system at once; an object store cannot append, so there a
    thread puts the open segment again every ten seconds and at every event that is not a step."""

    def __init__(
        self, run: Folder, enabled: bool = True, *, term: int = 0, say: Callable[[str], None] | None = None
    ) -> None:
        """Begin the lease's first segment; only this raises what the store raises.

        ``enabled`` is false on ranks that do not write. ``term``: the number of the claim on the run; 0 takes the next that
        no segment has. ``say`` hears of storage trouble and of its end, from any thread.
        """
        self._folder, self._enabled, self._say = run / "journal", enabled, say
        self.term = term or 1
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._problem = ""
        """Why the store did not take the last that it was given."""
        self._failed_tries = 0
        self._puts_at_s = _NEVER
        """When the thread is next to store what waits, on the monotonic clock."""
        self._is_awaited = False
        self._closing = False
        if not enabled:
            return
        self._segments, self._spool = Segments(self._folder, term), Spool()
        self.term = self._segments.term
        self._open = self._segments.first
        self._waiting: collections.deque[Segment] = collections.deque([self._open])
        """Segments that are open or not stored whole, oldest first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Take one event, stamped with this lease. Never raises for the store's sake, and waits for a local disk only."""
        if not self._enabled:
            return
        line = json.dumps(_shown(record(dataclasses.replace(event, term=self.term)))).encode() + b"\n"
        with self._changed:
            if self._open.num_lines >= _SEGMENT_LINES:
                self._next_segment()
            self._open.add(line)
            if self._folder.is_local and not self._problem:
                self._write_here()
            elif not isinstance(event, StepDone):
                self._want(0.0)
            elif self._puts_at_s == _NEVER:
                self._want(_PUT_S)

    def flush(self, patience_s: float = _CLOSE_S) -> bool:
        """Wait until the store has every event so far; False when it has not taken them in time."""
        if not self._enabled:
            return True
        with self._changed:
            if not self._is_whole():
                self._puts_at_s = 0.0
                self._start()
            self._is_awaited = True
            try:
                return self._changed.wait_for(self._is_whole, patience_s)
            finally:
                self._is_awaited = False

    def close(self) -> None:
        """Make what was written last, or say where it was left. No event may follow."""
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

    def _next_segment(self) -> None:
        self._open.is_closed = True
        if self._open.is_stored:
            self._waiting.remove(self._open)
        self._open = Segment()
        self._waiting.append(self._open)
        self._spool.relieve(self._waiting)

    def _write_here(self) -> None:
        """In the caller's thread; the other one takes over where that fails."""
        try:
            self._segments.store(self._open, self._segments.wanted(self._open))
        except OSError as error:
            self._fail(error)
            self._want(_FIRST_PAUSE_S)

    def _want(self, after_s: float) -> None:
        """Have the thread store what waits so soon; where a time is set because of trouble, then."""
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
            except Exception as error:  # stores raise what their clients raise
                with self._changed:
                    self._fail(error)
                    self._puts_at_s = time.monotonic() + self._pause_s()
            else:
                with self._changed:
                    self._took(segment)

    def _next(self) -> Segment | None:
        """The thread waits for it: the oldest segment of which the store lacks something, when its time has come. None at the
        end."""
        with self._changed:
            while not self._closing:
                left_s = self._puts_at_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s if self._puts_at_s < _NEVER else None)
                    continue
                self._puts_at_s = _NEVER  # what comes meanwhile sets the time anew
                for segment in self._waiting:
                    if not segment.is_stored:
                        return segment
            return None

    def _took(self, segment: Segment) -> None:
        if segment.is_closed and segment.is_stored and segment in self._waiting:
            self._waiting.remove(segment)
            self._spool.release(segment)
        left = [one for one in self._waiting if not one.is_stored]
        # an object store may lack what has come just now, as it always may
        is_behind = bool(left) and (self._folder.is_local or left[0] is not self._open)
        if is_behind or (left and self._is_awaited):
            self._puts_at_s = 0.0
        if self._problem and not is_behind:
            self._problem, self._failed_tries = "", 0
            self._tell(f"the journal in {self._folder.url} is whole again")
        self._changed.notify_all()

    def _pause_s(self) -> float:
        longest_s = _AWAITED_PAUSE_S if self._is_awaited else _LONGEST_PAUSE_S
        return random.uniform(0.5, 1.0) * min(longest_s, _FIRST_PAUSE_S * 2.0 ** (self._failed_tries - 1))

    def _fail(self, error: Exception) -> None:
        self._failed_tries += 1
        if not self._problem:
            self._tell(
                f"the journal cannot be written to {self._folder.url} ({error}); training goes on, its events are kept"
            )
        self._problem = str(error) or type(error).__name__

    def _leave_behind(self) -> None:
        """Files for a person to put where the store did not take them."""
        left = [segment for segment in self._waiting if not segment.is_stored]
        lines = sum(segment.num_lines for segment in left)
        try:
            where = self._spool.leave(self._segments.named(left))
        except OSError as error:
            self._tell(
                f"EVENTS ARE LOST: neither {self._folder.url} nor this machine's disk takes the journal ({error})"
            )
            return
        self._tell(
            f"the journal could not be written to {self._folder.url} ({self._problem}): {lines} events are in {where}; "
            f"copy its files into {self._folder.url} when it can be written, over those of the same names"
        )

    def _tell(self, text: str) -> None:
        text = redacted(text)
        _log.warning("%s", text)
        if self._say is not None:
            with contextlib.suppress(OSError):  # of a console that is gone
                self._say(text)


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    """An event's without passwords: reasons quote the URLs that errors name."""
    return {key: redacted(value) if isinstance(value, str) else value for key, value in values.items()}


def read_journal(run: Folder) -> list[Event]:
    """Every event of a run, in the order it was written. A line cut short by a kill is left out; so is one that is damaged or
    of another version, and the log names it."""
    return list(_events(run / "journal"))


_TOLD: set[tuple[str, int]] = set()
"""(segment, line) of damaged lines that this process has warned of."""


def _events(folder: Folder) -> Iterator[Event]:
    for term, number in listed(folder):
        where = folder.where(name_of(term, number))
        lines = folder.read(name_of(term, number)).split(b"\n")
        # what follows the last newline is empty, or was being written when the writer died
        for at, line in enumerate(lines[:-1], 1):
            try:
                yield event(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                _warn(where, at, error)


def _warn(segment: str, line: int, error: Exception) -> None:
    if (segment, line) in _TOLD:
        return
    _TOLD.add((segment, line))
    _log.warning(
        "%s: line %d is left out: it is damaged, or of another version of springtide (%s: %s); restore the file from a "
        "copy, or remove the line",
        segment,
        line,
        type(error).__name__,
        error,
    )


def last_steps(events: list[Event]) -> list[StepDone]:
    """One event a step, the last that was trained where a step was trained twice, in order of steps."""
    steps: dict[int, StepDone] = {one.step: one for one in events if isinstance(one, StepDone)}
    return [steps[step] for step in sorted(steps)]


def frame(events: list[Event]) -> Any:
    """The steps of ``last_steps`` as a pandas DataFrame, indexed by step."""
    import pandas as pd  # a notebook's need, not the loop's

    steps = [dataclasses.asdict(one) for one in last_steps(events)]
    return pd.DataFrame(steps).set_index("step") if steps else pd.DataFrame()
