"""One listener that passes each event of a run to several listeners. If one of them fails, the others still get the event."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from springtide.events import Event, StepDone, Stopped

_log = logging.getLogger(__name__)


class Listeners:
    """Passes each event to all listeners, in order.

    If a listener raises OSError (such as an unreachable store), the error is logged. Further OSErrors of this listener are
    logged only after it has accepted an event again. Any other error is raised after all listeners were called.
    """

    def __init__(self, listeners: Sequence[Callable[[Event], None]]) -> None:
        self._listeners = listeners
        self._failed: set[int] = set()
        self.last_step = 0
        """The last trained step in the events so far."""
        self.finished = False
        """Whether the latest ``Stopped`` event has the status ``finished``."""

    def __call__(self, event: Event) -> None:
        """Pass one event to all listeners."""
        if isinstance(event, StepDone | Stopped):
            self.last_step = event.step
        if isinstance(event, Stopped):
            self.finished = event.status == "finished"
        error: Exception | None = None
        for number, listener in enumerate(self._listeners):
            try:
                listener(event)
                self._failed.discard(number)
            except OSError as problem:
                if number not in self._failed:
                    _log.warning("%s cannot receive events (%s); training continues", _name(listener), problem)
                self._failed.add(number)
            except Exception as problem:
                error = error or problem
        if error is not None:
            raise error


def _name(listener: Callable[[Event], None]) -> str:
    return getattr(listener, "__qualname__", type(listener).__name__)
