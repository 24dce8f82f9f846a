"""Progress output: one live line on a terminal or in a notebook; elsewhere a plain line at intervals."""

from __future__ import annotations

import functools
import html
import math
import sys
import time
from collections.abc import Callable
from typing import Any, Self

import rich.console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from springtide.errors import printable, redacted
from springtide.events import Event, Monitored, Sampled, Started, StepDone, Waited
from springtide.events.metrics import utilisation

_PLAIN_EVERY_S = 10.0
_BAR_EVERY_S = 0.25
_PLAIN_PARTS = 20
_SMOOTHING = 0.9


class Console:
    """An event listener that prints the progress of a run."""

    def __init__(
        self,
        total_steps: int,
        enabled: bool = True,
        console: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``enabled``: False prints nothing. ``clock``: function that returns the time in seconds."""
        self._total, self._enabled, self._clock = total_steps, enabled, clock
        self._console = console or rich.console.Console(highlight=False)
        self._step_time_s = 0.0
        self._printed_at, self._printed_step = clock(), 0
        self._bar = NotebookBar(total_steps) if console is None and in_notebook() else None
        cut = functools.partial(Column, no_wrap=True, overflow="crop")  # not every encoding has an ellipsis
        self._progress = Progress(
            TextColumn("[bold]step {task.completed}/{task.total}", table_column=cut()),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[figures]}", table_column=cut()),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("train", total=total_steps, figures="waiting for workers")

    def __enter__(self) -> Self:
        if self._enabled and self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Print one event."""
        if not self._enabled:
            return
        if isinstance(event, Started):  # step and speed may have changed: measure again
            self._step_time_s, self._printed_step = 0.0, event.step
        if isinstance(event, StepDone):
            self._step(event)
        elif isinstance(event, Sampled):
            self._console.print(Panel(self._text(event.prompt + event.text), title=f"sample at step {event.step}"))
        elif not isinstance(event, Waited) and not (isinstance(event, Monitored) and not event.xids):
            self.say(event.describe())

    def say(self, text: str) -> None:
        """Print a line of text. If the output is not a terminal, long lines are not wrapped."""
        if self._enabled:
            self._console.print(self._text(redacted(text)), soft_wrap=not self._console.is_terminal)

    def _text(self, text: str) -> Text:
        """Return ``text`` with each character that the output cannot encode replaced by "?". Without this, the library
        ``rich`` would raise and keep the text in its buffer, so that every later print would also fail."""
        encoding = self._console.encoding
        return Text(printable(text).encode(encoding, "replace").decode(encoding))

    def _step(self, event: StepDone) -> None:
        before = self._step_time_s or event.step_time_s
        self._step_time_s = _SMOOTHING * before + (1 - _SMOOTHING) * event.step_time_s
        left_s = (self._total - event.step) * self._step_time_s
        figures = (
            f"loss {event.loss:.3f}  {event.tokens_per_s:,.0f} tokens/s  ETA {_clock_time(left_s)}  "
            f"{event.world_size} workers  MFU {utilisation(event.mfu)}"
        )
        self._progress.update(self._task, completed=event.step, figures=figures)
        if not event.updated and not math.isfinite(event.grad_norm):  # a skipped spike has its own event
            scale = f", loss scale {event.loss_scale:g}" if event.loss_scale != 1.0 else ""
            self.say(f"step {event.step} is skipped: loss {event.loss:g}, gradient norm {event.grad_norm:g}{scale}")
        if self._console.is_terminal:
            return
        now = self._clock()
        if self._bar is not None:
            if now - self._printed_at >= _BAR_EVERY_S or event.step in (1, self._total):
                self._bar.show(event.step, figures)
                self._printed_at = now
            return
        far_enough = event.step - self._printed_step >= self._total / _PLAIN_PARTS
        if (far_enough and now - self._printed_at >= _PLAIN_EVERY_S) or event.step == self._total:
            self.say(f"step {event.step}/{self._total}  {figures}")
            self._printed_at, self._printed_step = now, event.step


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# The progress bar in a notebook: HTML that is updated in place in the cell's output. It needs no widgets.


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")  # do not import it (slow): a notebook has it loaded
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookBar:
    """A bar with a line of text, shown in the output of the cell that runs."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._shown: Any = None

    def show(self, done: int, figures: str) -> None:
        """Draw the progress bar, or update it if it was drawn before."""
        from IPython.display import HTML, display

        page = HTML(bar_html(done, self._total, figures))
        if self._shown is None:
            self._shown = display(page, display_id=True)
        else:
            self._shown.update(page)


def bar_html(done: int, total: int, figures: str) -> str:
    """Return a progress bar as HTML, with the text ``figures`` (such as the loss), which is escaped.

    >>> bar_html(3, 60, "loss 5.1")
    '<progress value="3" max="60"></progress> step 3/60&ensp;loss 5.1'
    """
    bar = f'<progress value="{done}" max="{max(1, total)}"></progress> step {done}/{total}'
    return bar + f"&ensp;{printable(html.escape(figures))}"
