"""Start Ray's dashboard after a run's first step: it takes some core-seconds, which the first step would wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from springtide.events import Event, StepDone
from springtide.on_ray._ray_private import start_dashboard
from springtide.on_ray.cluster.session import dashboard_hint


class LateDashboard:
    """A listener of a run on the private cluster that this process has started. Use it as a context manager: on exit the
    dashboard has started, or does not start any more."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """``say`` prints a line."""
        self._say, self._thread = say, threading.Thread(target=self._start, name="springtide-dashboard")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def __call__(self, event: Event) -> None:
        """Start the dashboard in a thread if this is the first step."""
        if isinstance(event, StepDone) and self._thread.ident is None:
            self._thread.start()

    def _start(self) -> None:
        if url := start_dashboard():
            self._say(f"Ray dashboard: http://{url}{dashboard_hint()}")
