"""What a run does now, as a value that grows with its events. Keeps a bounded number of them. Pure."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import NamedTuple

from springtide.events import Event, Ready, Saved, Started, StepDone, Waited
from springtide.run.why import DiagnosisBuilder
from springtide.track.ledger import Prices
from springtide.track.run_state import RunState
from springtide.track.timeline import Timeline

_POINTS = 64
"""Points of the loss curve: when there are twice as many, each two become one."""
_SIZES, _MESSAGES = 6, 8
_SILENT_S = 60.0
"""Without an event for this time, and for this many steps' time, a run is said to be silent."""
_SILENT_STEPS = 5


class Picture(NamedTuple):
    """A run at a moment."""

    state: str
    """``not started``, ``starting``, ``training``, ``paused``, ``waiting``, ``finished``, ``stopped`` or ``failed``; with a
    remark if no event came for long."""
    is_over: bool
    """Whether its driver has said that training ended."""
    step: int
    num_steps: int
    loss: float | None
    """Training loss of the last step [nats/token]."""
    losses: list[float]
    """The loss over the whole run, at most 128 means over equally many steps [nats/token]."""
    tokens_per_s: float
    mfu: float
    """MFU of the last step; above 1 if the device's peak is not known."""
    left_s: float
    """Time until the last step at the present speed [s]; 0 if unknown."""
    workers: int
    """Workers of the group that trains; 0 without one."""
    sizes: list[tuple[int, int]]
    """The last changes of the number of workers: (step, workers)."""
    checkpoint: str
    """Name of the newest checkpoint; empty before the first."""
    checkpoint_age_s: float
    goodput: float
    dollars: float
    limit: str
    """The most costly finding of ``springtide run why``; empty if none is known yet."""
    remedy: str
    messages: list[str]
    """The last events but steps, oldest first."""
    seen_s: float
    """When the last event was, seconds since 1970; 0 without one."""


class WatchedRun:
    """Takes the journal of a run part by part."""

    def __init__(self, num_steps: int, prices: Prices | None = None) -> None:
        self._num_steps = num_steps
        self._why = DiagnosisBuilder(prices)
        self._losses: list[float] = []
        self._per_point, self._sum, self._summed = 1, 0.0, 0
        self._sizes: deque[tuple[int, int]] = deque(maxlen=_SIZES)
        self._messages: deque[str] = deque(maxlen=_MESSAGES)
        self._saved: Saved | None = None
        self._state, self._seen_s = RunState(), 0.0

    def take(self, timeline: Timeline) -> list[str]:
        """Take a part of the journal. Returns its events as lines for people, but those that are not told, such as steps."""
        for loss in timeline.tries["loss"].tolist():
            self._add_loss(loss)
        return [line for event in self._why.take(timeline) if (line := self._add(event))]

    def _add(self, event: Event) -> str:
        self._seen_s = max(self._seen_s, event.time_s)
        self._state.add(event)
        match event:
            case Started():
                if not self._sizes or self._sizes[-1][1] != event.world_size:
                    self._sizes.append((event.step, event.world_size))
            case Saved():
                self._saved = event
            case StepDone() | Waited() | Ready():
                return ""
        clock = time.strftime("%H:%M:%S", time.gmtime(event.time_s))
        self._messages.append(f"{clock}  {event.describe()}")
        return self._messages[-1]

    def picture(self, now_s: float) -> Picture:
        """Return the run at ``now_s``, seconds since 1970."""
        last, book, found = self._why.last, self._why.book.ledger(), self._why.diagnosis().findings
        times = sorted(one.step_time_s for one in self._why.recent if math.isfinite(one.step_time_s))
        step_s = times[len(times) // 2] if times else 0.0
        step = last.step if last else 0
        silent_s = now_s - self._seen_s if self._seen_s and not self._state.is_over else 0.0
        is_silent = silent_s > max(_SILENT_S, _SILENT_STEPS * step_s) and self._state.trains
        remark = f", no event for {span(silent_s)}: it saves or evaluates, hangs, or was killed" if is_silent else ""
        return Picture(
            state=self._state.word + remark,
            is_over=self._state.is_over,
            step=step,
            num_steps=self._num_steps,
            loss=last.loss if last else None,
            losses=[*self._losses, *([self._sum / self._summed] if self._summed else [])],
            tokens_per_s=last.tokens_per_s if last else 0.0,
            mfu=last.mfu if last else 0.0,
            left_s=max(0, self._num_steps - step) * step_s if self._state.trains else 0.0,
            workers=self._sizes[-1][1] if self._state.trains and self._sizes else 0,
            sizes=list(self._sizes),
            checkpoint=self._saved.name if self._saved else "",
            checkpoint_age_s=max(0.0, now_s - self._saved.time_s) if self._saved else 0.0,
            goodput=book.goodput,
            dollars=book.total_dollars,
            limit=found[0].describe() if found else "",
            remedy=found[0].remedy if found else "",
            messages=list(self._messages),
            seen_s=self._seen_s,
        )

    def _add_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            return
        self._sum, self._summed = self._sum + loss, self._summed + 1
        if self._summed < self._per_point:
            return
        self._losses.append(self._sum / self._summed)
        self._sum, self._summed = 0.0, 0
        if len(self._losses) >= 2 * _POINTS:
            pairs = zip(self._losses[::2], self._losses[1::2], strict=True)
            self._losses, self._per_point = [(one + other) / 2 for one, other in pairs], 2 * self._per_point


def span(seconds: float) -> str:
    """Return a duration for people, in its largest unit that is at least 1.

    Examples:
        >>> from springtide.run.watch import span
        >>> span(7.4), span(90.0), span(7200.0), span(200_000.0)
        ('7 s', '2 min', '2.0 h', '2.3 d')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 86_400 else f"{seconds / 86_400:.1f} d"
