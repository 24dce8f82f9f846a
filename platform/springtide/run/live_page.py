"""A run's page that follows the run: each refresh reads only what is new in its folder."""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from springtide.report.run_charts import curves
from springtide.report.run_page import RunFacts, is_over, parts, render
from springtide.run.page_facts import facts_of
from springtide.track.journal_reader import JournalReader

if TYPE_CHECKING:
    from springtide.run.folder import Run

_REFRESH_S = 1.0
"""Least time between two looks into the folder, however many browsers ask."""
_SHARE = 5
"""A browser waits this many times as long as a refresh takes before it asks again."""
_VERSIONS_KEPT = 500


class _Version(NamedTuple):
    number: int
    changed_from: float
    """The lowest step that is new or changed."""


class LivePage:
    """The page of one run, for any number of browsers and threads."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        """Read nothing yet.

        Args:
            run: the run.
            clock: returns seconds.
        """
        self._run, self._clock, self._lock = run, clock, threading.Lock()
        self._reader = JournalReader(run.folder)
        self._versions: collections.deque[_Version] = collections.deque(maxlen=_VERSIONS_KEPT)
        self._parts: dict[str, tuple[int, str]] = {}
        """Name -> (version that changed it, HTML)."""
        self._facts = RunFacts()
        self._num_events = -1
        self._dirty_from = math.inf
        """The lowest step that has changed since the newest version; infinite if nothing has."""
        self._read_s, self._took_s = -math.inf, 0.0

    def html(self) -> str:
        """Return the whole page. OSError if the store cannot be reached, ConfigError if the config is damaged."""
        with self._lock:
            self._refresh()
            return render(self._run.id, self._reader.timeline, self._facts, self._version)

    def update(self, have: int) -> dict[str, Any]:
        """Return what has changed since version ``have``, for the page's script; errors as for ``html``."""
        with self._lock:
            self._refresh()
            timeline, known = self._reader.timeline, {one.number for one in self._versions}
            found: dict[str, Any] = {"version": self._version, "over": is_over(timeline)}
            found["wait_s"] = round(_SHARE * self._took_s, 1)
            if have == self._version:
                return found
            is_known = have in known
            newer = [one.changed_from for one in self._versions if one.number > have]
            found["parts"] = {
                name: text for name, (number, text) in self._parts.items() if number > have or not is_known
            }
            return found | curves(timeline, min(newer, default=0.0) if is_known else 0.0)

    @property
    def _version(self) -> int:
        return self._versions[-1].number if self._versions else 0

    def _refresh(self) -> None:
        begun_s = self._clock()
        if begun_s - self._read_s < _REFRESH_S:
            return
        if self._reader.read():
            self._dirty_from = min(self._dirty_from, self._reader.changed_from)
        if self._dirty_from < math.inf or not self._versions:
            timeline = self._reader.timeline
            if len(timeline.events) != self._num_events:  # a start, a save, an evaluation: what else changes with it
                self._facts, self._num_events = facts_of(self._run, is_file=False), len(timeline.events)
            number = self._version + 1
            for name, text in parts(timeline, self._facts).items():
                if self._parts.get(name, (0, ""))[1] != text:
                    self._parts[name] = (number, text)
            self._versions.append(_Version(number, self._dirty_from))
            self._dirty_from = math.inf  # only now: what is above may find the store away, and is tried again
        self._read_s = self._clock()
        self._took_s = self._read_s - begun_s
