"""Start Ray's dashboard once a run trains: it takes some core-seconds, which the first step, and a short run's end, would wait
for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

from springtide.events import Event, StepDone
from springtide.ray._ray_private import start_dashboard
from springtide.ray.cluster.session import dashboard_hint

_AFTER_S = 20.0
"""How long a run trains before the dashboard starts [s]."""


class LateDashboard:
    """A listener of a run on the private cluster that this process has started. Use it as a context manager: on exit the
    dashboard has started, or does not start any more."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """``say`` prints a line."""
        self._say, self._thread = say, threading.Thread(target=self._start, name="springtide-dashboard")
        self._begun_s = 0.0
        """When the first step was done, of ``time.monotonic``; 0 before [s]."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def __call__(self, event: Event) -> None:
        """Start the dashboard in a thread at the first step that is done so long after the first one."""
        if not isinstance(event, StepDone) or self._thread.ident is not None:
            return
        self._begun_s = self._begun_s or time.monotonic()
        if time.monotonic() - self._begun_s >= _AFTER_S:
            self._thread.start()

    def _start(self) -> None:
        if url := start_dashboard():
            self._say(f"Ray dashboard: http://{url}{dashboard_hint()}")
