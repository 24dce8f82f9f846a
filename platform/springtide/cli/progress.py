"""Progress bars on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from springtide.dataset import Progress


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield a function (stage, done, total) that shows one bar per stage; silent if stderr is not a terminal."""
    from rich import progress
    from rich.console import Console

    with progress.Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as shown:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=total)
            shown.update(tasks[stage], completed=done, visible=done < total)

        yield report
