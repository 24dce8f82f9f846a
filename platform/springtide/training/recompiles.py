"""Warning when blocks that should be compiled no longer are."""

from __future__ import annotations

from collections.abc import Iterator

from springtide.distributed.compiled import gave_up
from springtide.events import Warned
from springtide.training.part import DoneStep, Part


class Recompiles(Part):
    """Watch of one worker group's compiled blocks."""

    def __init__(self, compiles: bool) -> None:
        """``compiles``: whether blocks should be compiled."""
        self._watching = compiles

    def after_step(self, done: DoneStep) -> Iterator[Warned]:
        """Warn once if some blocks no longer run compiled."""
        if self._watching and (reason := gave_up()):
            self._watching = False
            yield Warned(step=done.step, reason=reason)
