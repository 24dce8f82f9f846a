"""Status of runs: of one run, updated with its events; and of all runs below a root, one row per run."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import time
from collections import deque
from typing import Any, NamedTuple

from springtide.config import RUN_CONFIG
from springtide.errors import in_one_line
from springtide.events import Decided, Evaluated, Event, Failed, Left, Ready, Saved, Started, StepDone, Stopped, Waited
from springtide.run.diagnosis import Diagnosis, DiagnosisBuilder
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.tracking.ledger import Prices, Restart, ledger
from springtide.tracking.run_state import UNKNOWN, RunState, run_state
from springtide.tracking.timeline import Timeline
from springtide.tune.folder import PLAN, SweepFolder

_POINTS = 64
"""A long run's loss curve has 64 to 128 points. At 128 points, each pair of points is replaced by its mean, which leaves 64."""
_SIZES, _MESSAGES = 6, 8
_SILENT_S = 60.0
"""Time without an event after which a run that trains counts as silent [s]; longer if ``_SILENT_STEPS`` steps take longer."""
_SILENT_STEPS = 5
_AT_ONCE = 16
"""Number of runs that are read at once, so that their requests to the store overlap."""


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """The status of a run at one moment."""

    state: str
    """``not started``, ``starting``, ``training``, ``paused``, ``waiting``, ``finished``, ``stopped`` or ``failed``."""
    is_over: bool
    """True if the driver has reported the end of training, or has ended without a report."""
    waits_for: str
    """Reason why no step is trained now, such as a start of workers or a missing node; empty while steps are trained."""
    step: int
    num_steps: int
    loss: float | None
    """Training loss of the last step [nats/token]."""
    losses: list[float]
    """The training loss over the whole run: at most 128 points, each the mean over an equal number of steps [nats/token]."""
    heldout_loss: float | None
    """Held-out loss of the last evaluation [nats/token]."""
    heldout_step: int
    """Number of steps done at the last evaluation; 0 without one."""
    tokens_per_s: float
    mfu: float
    """MFU of the last step; above 1 if the device's peak is not known."""
    left_s: float
    """Estimated time until the run's last step [s]: steps left times the median duration of recent steps; 0 if unknown."""
    workers: int
    """Number of workers in the current group; 0 if no group trains."""
    sizes: list[tuple[int, int]]
    """(step, number of workers) of the newest changes of the number of workers, oldest first."""
    restarts: int
    """Number of restarts: changes from one worker group to the next."""
    steps_lost: int
    """Number of steps whose results were lost in restarts, and which had to be trained again."""
    last_restart: Restart | None
    checkpoint: str
    """Name of the newest committed checkpoint; empty before the first."""
    checkpoint_age_s: float
    dollars: float
    diagnosis: Diagnosis
    """How the run's time was spent, what limits its speed, and remedies."""
    messages: list[str]
    """The newest events as lines of text for users, oldest first. Steps are left out."""
    seen_s: float
    """Time of the newest event, seconds since 1970; 0 without one."""

    def as_dict(self) -> dict[str, Any]:
        """Return the status as plain data, as ``springtide run status --json`` prints it."""
        found = dataclasses.asdict(self)
        del found["diagnosis"]
        return {**found, **self.diagnosis.as_dict()}


class StatusBuilder:
    """Builds the status of a run from its journal, part by part, as the journal grows. It stores only the newest steps."""

    def __init__(self, num_steps: int, prices: Prices | None = None) -> None:
        self._num_steps = num_steps
        self._diagnosis = DiagnosisBuilder(prices)
        self._losses: list[float] = []
        self._per_point, self._sum, self._summed = 1, 0.0, 0
        self._sizes: deque[tuple[int, int]] = deque(maxlen=_SIZES)
        self._messages: deque[str] = deque(maxlen=_MESSAGES)
        self._saved: Saved | None = None
        self._evaluated: Evaluated | None = None
        self._state, self._seen_s = RunState(), 0.0
        self._has_group, self._waits_for = False, ""

    def take(self, timeline: Timeline) -> list[str]:
        """Add the events of a part of the journal. Return them as lines of text for users, without steps and other frequent
        events."""
        for loss in timeline.tries["loss"].tolist():
            self._add_loss(loss)
        return [line for event in self._diagnosis.take(timeline) if (line := self._add(event))]

    def _add(self, event: Event) -> str:
        self._seen_s = max(self._seen_s, event.time_s)
        self._state.add(event)
        match event:
            case Started():
                self._has_group, self._waits_for = True, f"the first step of {event.where}"
                if not self._sizes or self._sizes[-1][1] != event.world_size:
                    self._sizes.append((event.step, event.world_size))
            case Decided(decision="stay"):
                if not (self._has_group and self._state.trains):  # while a group trains, the run waits for nothing
                    self._waits_for = event.reason.removeprefix("waiting for ")
            case Decided():
                self._waits_for = event.describe()
            case Failed() | Left():
                cause = f", after {event.cause}" if isinstance(event, Failed) else ""
                self._has_group, self._waits_for = False, f"a new worker group{cause}"
            case Saved():
                self._saved = event
            case Evaluated():
                self._evaluated = event
            case StepDone() | Stopped():
                self._waits_for = ""
        if isinstance(event, StepDone | Waited | Ready):
            return ""
        clock = time.strftime("%H:%M:%S", time.gmtime(event.time_s))
        self._messages.append(f"{clock}  {event.describe()}")
        return self._messages[-1]

    def status(self, now_s: float) -> RunStatus:
        """Return the run's status at the time ``now_s``, seconds since 1970."""
        last, book, state = self._diagnosis.last, self._diagnosis.book.ledger(), self._state
        times = sorted(one.step_time_s for one in self._diagnosis.recent if math.isfinite(one.step_time_s))
        step_s = times[len(times) // 2] if times else 0.0
        step = last.step if last else 0
        waits_for = [self._waits_for] if self._waits_for else []
        silent_s = now_s - self._seen_s if self._seen_s and state.trains else 0.0
        if silent_s > max(_SILENT_S, _SILENT_STEPS * step_s):
            waits_for.append(f"no event for {span(silent_s)}: it saves or evaluates, hangs, or was killed")
        return RunStatus(
            state=state.word,
            is_over=state.is_over,
            waits_for="; ".join(waits_for),
            step=step,
            num_steps=self._num_steps,
            loss=last.loss if last else None,
            losses=[*self._losses, *([self._sum / self._summed] if self._summed else [])],
            heldout_loss=self._evaluated.heldout_loss if self._evaluated else None,
            heldout_step=self._evaluated.step if self._evaluated else 0,
            tokens_per_s=last.tokens_per_s if last else 0.0,
            mfu=last.mfu if last else 0.0,
            left_s=max(0, self._num_steps - step) * step_s if state.trains else 0.0,
            workers=self._sizes[-1][1] if state.trains and self._sizes else 0,
            sizes=list(self._sizes),
            restarts=len(book.restarts),
            steps_lost=sum(max(0, one.steps_lost) for one in book.restarts),
            last_restart=book.restarts[-1] if book.restarts else None,
            checkpoint=self._saved.name if self._saved else "",
            checkpoint_age_s=max(0.0, now_s - self._saved.time_s) if self._saved else 0.0,
            dollars=book.total_dollars,
            diagnosis=self._diagnosis.diagnosis(),
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
        >>> from springtide.run.run_status import span
        >>> span(7.4), span(90.0), span(7200.0), span(200_000.0)
        ('7 s', '2 min', '2.0 h', '2.3 d')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 86_400 else f"{seconds / 86_400:.1f} d"


class RunRow(NamedTuple):
    """A run or a sweep, as a row in the table of all runs."""

    id: str
    state: str
    """For a run: ``Run.status``, or why the run cannot be read. For a sweep: the word ``sweep`` and its number of trials."""
    step: int
    num_steps: int
    """Number of steps to train; 0 for a sweep or a run that cannot be read."""
    loss: float | None
    """Training loss of the last step [nats/token]."""
    workers: int
    goodput: float
    dollars: float
    energy_kwh: float
    """Energy that the run's workers measured [kWh]; 0 if they measured none."""
    seen_s: float
    """Time of the newest event, in seconds since 1970; 0 without one. For a sweep: the time at which it was created."""
    where: str = ""
    """Workers, nodes and market types (such as ``spot``) of the newest worker group; empty before the first. For a sweep: path
    of its HTML page."""


def overview(root: str) -> list[RunRow]:
    """Return a row for each run and each sweep directly below ``root``, sorted by the time of the newest event, newest first. A
    run that cannot be read has a row, too. If ``root`` is the folder of a sweep, the rows are its trials.

    Requests to the store: one listing of ``root`` and one of each folder in it; for each run, a second listing and reads of its
    config and journal. Sixteen runs are read at once. A single recursive listing would be slower, because it would list the
    files of all checkpoints.

    Args:
        root: folder or URL of runs (``run.root``), or of a sweep.

    Examples:
        >>> [(row.id, row.state, row.step) for row in overview("runs") if row.id == "mine"]
        [('mine', 'finished', 8)]
    """
    folder = Folder(root)
    names = folder.names()
    if PLAN in names:
        folder = SweepFolder(folder).trials
        names = folder.names()
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
        rows = threads.map(lambda name: _row(folder / name), names)
        return sorted((row for row in rows if row is not None), key=lambda row: (-row.seen_s, row.id))


def _row(folder: Folder) -> RunRow | None:
    run = Run(folder)
    try:
        names = folder.names()
        if PLAN in names:
            return _sweep(SweepFolder(folder))
        return _read(run) if RUN_CONFIG in names else None
    except Exception as error:  # report a broken run in its row, so that the table still shows all other runs
        return RunRow(run.id, f"cannot be read: {in_one_line(error)}", 0, 0, None, 0, 0.0, 0.0, 0.0, 0.0)


def _sweep(sweep: SweepFolder) -> RunRow:
    """Return the row of a sweep in the table of runs. Takes one listing of the store and one request."""
    trials, made_s = len(sweep.trials.names()), sweep.root.written_s(PLAN)
    state = f"sweep, {trials} trial{'s' * (trials != 1)}"
    return RunRow(sweep.name, state, 0, 0, None, 0, 0.0, 0.0, 0.0, made_s if math.isfinite(made_s) else 0.0, sweep.page)


def _read(run: Run) -> RunRow:
    config, timeline = run.config, run.timeline
    told = timeline.condensed()
    book = ledger(told, Prices.set_in(config.track))
    tries = timeline.tries  # the last row is the newest step: rows are in the order of writing, not of their times
    last = {name: tries[name][-1].item() for name in ("step", "loss", "world_size")} if len(tries) else {}
    state = run_state(timeline.events).known
    starts = [event for event in timeline.events if isinstance(event, Started)]
    return RunRow(
        id=run.id,
        state=state,
        step=int(last.get("step", 0)),
        num_steps=config.num_steps,
        loss=last.get("loss"),
        workers=int(last.get("world_size", 0)) if state == UNKNOWN else 0,
        goodput=round(book.goodput, 6),
        dollars=round(book.total_dollars, 6),
        energy_kwh=round(book.total_kwh, 9),
        seen_s=max((event.time_s for event in told), default=0.0),
        where=starts[-1].where if starts else "",
    )
