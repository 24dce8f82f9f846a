"""Whether the blocks that should be compiled still are."""

from __future__ import annotations

from collections.abc import Iterator

from springtide.events import Warned
from springtide.parallel import gave_up


class Recompiles:
    """Of one group of workers."""

    def __init__(self, compiles: bool) -> None:
        """``compiles``: whether blocks should be."""
        self._watching = compiles

    def after(self, step: int) -> Iterator[Warned]:
        """Tell once, after ``step``, that some no longer are."""
        if self._watching and (reason := gave_up()):
            self._watching = False
            yield Warned(step=step, reason=reason)
