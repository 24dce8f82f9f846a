"""Everybody who hears the events of a run, as one listener: one that fails does not stop the next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from springtide.events import Event, StepDone, Stopped

_log = logging.getLogger(__name__)


class Listeners:
    """Tells each event to all, in their order.

    OSError of a listener (a store that is away, a console that is gone) is warned of, once each until it works again. Any other
    error is raised, once all have heard.
    """

    def __init__(self, listeners: Sequence[Callable[[Event], None]]) -> None:
        self._listeners = listeners
        self._failed: set[int] = set()
        self.last_step = 0
        """The step last trained, as heard."""
        self.finished = False
        """Whether the run was heard to have come to its last step."""

    def __call__(self, event: Event) -> None:
        """Tell one event."""
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
                    _log.warning("%s does not hear what happens (%s); training goes on", _name(listener), problem)
                self._failed.add(number)
            except Exception as problem:
                error = error or problem
        if error is not None:
            raise error


def _name(listener: Callable[[Event], None]) -> str:
    return getattr(listener, "__qualname__", type(listener).__name__)
