"""Run the user's own event listener in a thread of the driver. It may be slow, raise or hang; training is not affected.

Events wait in a queue of bounded length. A full queue drops its oldest event rather than the newest, so that the listener still
receives the end of the run. Dropped events are counted and logged. Each event is delivered at most once: a restart of the run
does not repeat undelivered events.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from typing import Self

from springtide.events import Event

_MOST_WAITING = 10_000
"""Most events that wait in the queue for the user's listener, about 10 MB."""
_GRACE_S = 15.0
_WARN_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class OwnListener:
    """Calls the user's function ``make`` once, which returns the user's listener, then calls the listener with every event. All
    calls are in one thread. Use it in a ``with`` block: on exit it waits up to ``grace_s`` seconds until all events are
    delivered."""

    def __init__(
        self,
        source: str,
        make: Callable[[], Callable[[Event], object]],
        most_waiting: int = _MOST_WAITING,
        grace_s: float = _GRACE_S,
    ) -> None:
        """``source``: value of the setting ``track.listener``, which log messages quote."""
        self._source, self._make, self._grace_s = source, make, grace_s
        self._waiting: collections.deque[Event] = collections.deque(maxlen=most_waiting)
        self._changed = threading.Condition()
        self._ends = False
        self._num_dropped = self._num_failed = 0
        self._warned_s = -_WARN_EVERY_S
        self._thread = threading.Thread(target=self._work, name="springtide-listener", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join(self._grace_s)
        with self._changed:
            num_left = len(self._waiting)
            self._waiting.clear()  # if the listener still hangs in a call, it gets no event after that call
        if self._thread.is_alive() or self._num_dropped or self._num_failed:
            end = f"it has not returned {self._grace_s:g} s after the last event" if self._thread.is_alive() else ""
            counts = f"{self._num_dropped} dropped, {num_left} not delivered, {self._num_failed} raised an error"
            _log.warning("track.listener = %r missed events: %s", self._source, "; ".join(filter(None, (counts, end))))

    def __call__(self, event: Event) -> None:
        """Queue one event; returns at once."""
        with self._changed:
            if not self._thread.is_alive():  # ``make`` failed, which was logged: drop the event
                return
            is_full = len(self._waiting) == self._waiting.maxlen
            self._num_dropped += is_full
            self._waiting.append(event)
            self._changed.notify()
        if is_full and time.monotonic() - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = time.monotonic()
            _log.warning(
                "track.listener = %r is slower than the run: %d events dropped so far, the oldest first; training continues",
                self._source,
                self._num_dropped,
            )

    def _work(self) -> None:
        try:
            hear = self._make()
            if not callable(hear):
                raise TypeError(f"it returned a {type(hear).__name__} in place of a function that takes an event")
        except (Exception, SystemExit):
            _log.warning("track.listener = %r did not start; the run trains without it", self._source, exc_info=True)
            return
        is_failing = False
        while (event := self._next()) is not None:
            try:
                hear(event)
                is_failing = False
            except (Exception, SystemExit):
                self._num_failed += 1
                if not is_failing:  # log the first of several failures in a row
                    _log.warning("track.listener = %r raised; training continues", self._source, exc_info=True)
                is_failing = True

    def _next(self) -> Event | None:
        """Wait for an event and return the oldest in the queue; None when the run has ended and the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ends)
            return self._waiting.popleft() if self._waiting else None
