"""Progress for a person: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Self

import rich.console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from springtide.errors import redacted
from springtide.events import (
    Decided,
    Evaluated,
    Event,
    Failed,
    Left,
    Profiled,
    Ready,
    Rejected,
    RolledBack,
    Sampled,
    Saved,
    SaveFailed,
    SaveIntervalChanged,
    SaveSkipped,
    SnapshotIntervalChanged,
    Spiked,
    Started,
    StepDone,
    Stopped,
    Straggling,
    Waited,
    Warned,
)
from springtide.events.metrics import utilisation

_PLAIN_EVERY_S = 10.0
_PLAIN_PARTS = 20
_SMOOTHING = 0.9


class Console:
    """A listener that prints."""

    def __init__(
        self,
        total_steps: int,
        enabled: bool = True,
        console: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``enabled`` is false for a run that should be silent. ``clock`` gives seconds."""
        self._total, self._enabled, self._clock = total_steps, enabled, clock
        self._console = console or rich.console.Console(highlight=False)
        self._step_time_s = 0.0
        self._printed_at, self._printed_step = clock(), 0
        self._progress = Progress(
            TextColumn("[bold]step {task.completed}/{task.total}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[figures]}"),
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
        """Show one event."""
        if not self._enabled:
            return
        if isinstance(event, Started):  # other workers: steps may go back, and take another time
            self._step_time_s, self._printed_step = 0.0, event.step
        if isinstance(event, StepDone):
            self._step(event)
        elif isinstance(event, Sampled):
            self._console.print(Panel(Text(event.prompt + event.text), title=f"sample at step {event.step}"))
        elif not isinstance(event, Waited):
            self.say(describe(event))

    def say(self, text: str) -> None:
        """Print a line; a log file gets it whole, however long."""
        if self._enabled:
            self._console.print(Text(redacted(text)), soft_wrap=not self._console.is_terminal)

    def _step(self, event: StepDone) -> None:
        before = self._step_time_s or event.step_time_s
        self._step_time_s = _SMOOTHING * before + (1 - _SMOOTHING) * event.step_time_s
        left_s = (self._total - event.step) * self._step_time_s
        figures = (
            f"loss {event.loss:.3f}  {event.tokens_per_s:,.0f} tokens/s  ETA {_clock_time(left_s)}  "
            f"{event.world_size} workers  MFU {utilisation(event.mfu)}"
        )
        self._progress.update(self._task, completed=event.step, figures=figures)
        if not event.updated and not math.isfinite(event.grad_norm):  # a spike tells itself
            scale = f", loss scale {event.loss_scale:g}" if event.loss_scale != 1.0 else ""
            self.say(f"step {event.step} is left out: loss {event.loss:g}, gradient norm {event.grad_norm:g}{scale}")
        if self._console.is_terminal:
            return
        now = self._clock()
        far_enough = event.step - self._printed_step >= self._total / _PLAIN_PARTS
        if (far_enough and now - self._printed_at >= _PLAIN_EVERY_S) or event.step == self._total:
            self.say(f"step {event.step}/{self._total}  {figures}")
            self._printed_at, self._printed_step = now, event.step


def describe(event: Event) -> str:
    """What is not a step, in a line."""
    match event:
        case Started():
            where = f"from step {event.step} ({event.resumed_from})" if event.resumed_from else "from the beginning"
            size = f"{event.num_parameters / 1e6:.1f}M parameters"
            peak = f"peak {event.peak_flops / 1e9:,.0f} GFLOP/s a worker"
            return "; ".join(filter(None, (f"{_workers(event.world_size)}, {where}", f"{size}, {peak}", event.remark)))
        case Evaluated():
            each = ", ".join(f"{name} {bits:.3f}" for name, bits in event.corpora.items() if len(event.corpora) > 1)
            figure = f"{event.heldout_bits_per_byte:.3f} bits per byte, loss {event.heldout_loss:.3f}"
            return f"step {event.step}: held-out {figure}" + (f" ({each})" if each else "")
        case Saved():
            size = f"{event.size_bytes / 2**20:.1f} MiB"
            if event.written_bytes < event.size_bytes:
                size += f" ({event.written_bytes / 2**20:.1f} MiB new)"
            waited = f", training waited {event.stall_s:.2f} s"
            return f"step {event.step}: saved {event.name}, {size} in {event.save_time_s:.2f} s{waited}"
        case SaveFailed():
            return f"step {event.step}: THE SAVE FAILED ({event.in_a_row} in a row): {event.reason}"
        case Warned():
            return f"step {event.step}: WARNING: {event.reason}"
        case SaveSkipped():
            return f"step {event.step}: save left out: {event.reason}"
        case SaveIntervalChanged():
            return f"step {event.step}: saving every {event.every_s:.0f} s: {event.reason}"
        case SnapshotIntervalChanged():
            often = f"every {event.every_steps} steps" if event.every_steps else "NO MORE"
            return f"step {event.step}: snapshots in memory {often}: {event.reason}"
        case Spiked():
            done = "it is left out" if event.left_out else "it is trained on"
            usual = f"{event.value:.4g} instead of {event.usual:.4g}, {event.deviations:.0f} deviations"
            return f"step {event.step}: {event.what} {usual}; {done}"
        case RolledBack():
            steps = ", ".join(map(str, event.skipped))
            return f"step {event.step}: ROLLED BACK, {event.reason}; steps {steps} of the order are jumped over from now on"
        case Profiled():
            each = ", ".join(f"{kind} {share:.0%}" for kind, share in event.shares.items() if share >= 0.005)
            top = ", ".join(f"{name} {share:.0%}" for name, share in event.top.items())
            found = f"bound by {event.bound_by} ({each}; most in {top})"
            return f"step {event.step}: {found}. Try {event.advice}. The trace: {event.trace}"
        case Straggling():
            where = f" on node {event.node[:8]}" if event.node else ""
            return f"step {event.step}: rank {event.rank}{where} is slow, {event.share:.0%} of the others' speed"
        case Rejected():
            return f"step {event.step}: {event.name} is put in quarantine, going on from here: {event.reason}"
        case Ready():
            return f"node {event.node[:8]} is ready, {event.took_s:.1f} s after its process was started"
        case Decided():
            return f"{event.decision}: {event.reason}"
        case Left():
            return f"step {event.step}: safe in {'the store' if event.kept_in == 'store' else 'memory'}; another group goes on"
        case Failed():
            return f"{event.cause}: {event.reason}" + ("" if event.again else "; this is not tried again")
        case Stopped():
            return f"step {event.step}: {event.status}" + (f": {event.reason}" if event.reason else "")
        case _:
            return event.kind


def _workers(number: int) -> str:
    return f"{number} worker{'s' if number != 1 else ''}"


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
