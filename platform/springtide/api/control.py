"""Execute the commands that users give to a run (save, pause, resize, stop; ``run.control``) while its driver trains the run.

    command file in the run's folder -> control thread -> request to the worker group, or limit on its workers
    event that shows the effect      -> control thread -> result file of the command

Training never waits for the control thread. The thread polls for commands every second in a local folder, and every ten seconds
in an object store, with one request per poll.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from springtide.config import Config
from springtide.elastic import GroupRequest
from springtide.errors import DamagedFile, SpringtideError
from springtide.events import Commanded, Decided, Event, Saved, SaveFailed, SaveSkipped, Started, StepDone, Stopped
from springtide.ray.train.mailbox import WorkerLimit
from springtide.run.control import (
    Command,
    CommandResult,
    Limits,
    has_command,
    numbers_from,
    read_command,
    read_result,
    standing,
    write_limits,
    write_result,
)
from springtide.run.folder import Run

_LOOK_S, _LOOK_AT_STORE_S = 1.0, 10.0
"""Time between two polls for a command, in a local folder and in an object store [s]."""
_LIST_EVERY = 20
"""One poll in this many lists the run's folder: this also finds commands behind a gap in the command numbers. The other polls
only check whether the next number exists."""
_END_S = 10.0
_log = logging.getLogger(__name__)


class Workers(Protocol):
    """The interface to a run's workers through which commands act; ``WorkerLender`` implements it."""

    def ask(self, request: GroupRequest) -> None:
        """Send a request to the current worker group."""

    def limit(self, limit: WorkerLimit) -> None:
        """Limit the number of workers."""

    def post(self, event: Event) -> None:
        """Post an event to the run's listeners."""


class Controls:
    """Executes the commands to one run. It is also a listener of the run's events: an event shows when a command takes
    effect."""

    def __init__(self, config: Config, run: Run, workers: Workers, step: int = 0) -> None:
        """Apply the worker limit and the pause that earlier commands have set. ``step``: number of the last trained step."""
        before = standing(run.folder)
        self._config, self._run, self._workers = config, run, workers
        self._next, self._unanswered = before.following, before.unanswered
        self._changed = threading.Condition()
        fits = not before.workers or not self._why_not(before.workers)
        self._limit = WorkerLimit(before.workers if fits else 0, before.paused_by)
        self._pending: list[tuple[Command, int]] = []
        """(command, step at which it was accepted) of each command that has not taken effect yet, oldest first."""
        self._results: list[CommandResult] = []
        """Results of commands that the control thread has not written to the run's folder yet."""
        self._step, self._workers_now = step, 0
        self._rests = False
        """True if the run is paused and its workers are released."""
        self._unheard = self._ended = False
        """``_unheard``: True if the worker group may have missed a save request, which must then be repeated. ``_ended``: True
        if the run has ended."""
        workers.limit(self._limit)

    @property
    def remarks(self) -> list[str]:
        """Remarks for the user if earlier commands have set a worker limit or a pause."""
        name, found = self._run.id, list[str]()
        if self._limit.paused_by:
            found.append(
                f"the run was paused by {self._limit.paused_by}: `springtide run continue {name}` lets it train"
            )
        if self._limit.workers:
            found.append(f"`springtide run resize` limits it to {self._limit.workers} workers")
        return found

    @contextlib.contextmanager
    def carried_out(self) -> Iterator[None]:
        """Execute commands in a thread during the ``with`` block. At its end, commands that have not taken effect yet get a
        failed result."""
        thread = threading.Thread(target=self._look_out, name="springtide-control", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify()
            # wait for the thread only a limited time: a store that does not respond must not delay the end of the run
            thread.join(_END_S)

    def __call__(self, event: Event) -> None:
        """Handle an event of the run. If it shows the effect of a command, such as a save, record the command's result."""
        with self._changed:
            match event:
                case StepDone():
                    self._step = event.step
                case Started():
                    self._step, self._workers_now, self._rests = event.step, event.world_size, False
                    # The new group may start at an earlier step than the step at which the user requested a save. Then the
                    # first save of the new group fulfils the request
                    self._pending = [(one, min(at, event.step)) for one, at in self._pending]
                    self._settle("resize", _train(event.world_size), self._is_small_enough)
                    self._unheard = True  # repeat a pending save request: the group that ended may have missed it
                case Saved():
                    self._settle("save", f"{event.name} is committed", lambda _, at: event.step >= at, event.step)
                    self._unheard = True  # a request that is still pending came after this save began: repeat it
                case SaveSkipped():
                    self._unheard = True
                case SaveFailed():
                    failed = f"the save failed: {event.reason}"
                    self._settle("save", failed, lambda _, at: event.step >= at, event.step, done=False)
                case Decided() if self._limit.paused_by and _is_pause(event):
                    self._rests, self._workers_now = True, 0
                    self._settle("pause", "saved; its workers are given back")
                case Stopped():
                    ended = event.status in ("stopped", "finished")
                    text = f"the run has {event.status}{f': {event.reason}' if event.reason else ''}"
                    self._settle("stop", text, step=event.step, done=ended)

    def _settle(
        self,
        verb: str,
        text: str,
        when: Callable[[Command, int], bool] = lambda one, at: True,
        step: int | None = None,
        done: bool = True,
    ) -> None:
        settled = [(one, at) for one, at in self._pending if one.verb == verb and when(one, at)]
        self._pending = [one for one in self._pending if one not in settled]
        for one, _ in settled:
            self._finish(one, text, step, done)

    def _is_small_enough(self, one: Command, _at: int) -> bool:
        return not one.workers or self._workers_now <= one.workers

    def _finish(self, one: Command, text: str, step: int | None = None, done: bool = True) -> None:
        at = self._step if step is None else step
        self._results.append(CommandResult(number=one.number, done=done, step=at, text=text[:2000]))
        self._changed.notify()

    def _look_out(self) -> None:
        look_s, warned, looks = _LOOK_S if self._run.folder.is_local else _LOOK_AT_STORE_S, False, 0
        while True:
            try:
                self._answer_old()
                looks += 1
                self._take_new(numbers_from(self._run.folder, self._next) if looks % _LIST_EVERY == 0 else ())
                self._drop_withdrawn()
                self._ask_again()
                warned = False
            except (OSError, SpringtideError) as error:
                if not warned:
                    _log.warning("%s: cannot read commands to this run (%s); retrying", self._run.folder.url, error)
                warned = True
            with self._changed:
                if not self._results and not self._ended:
                    self._changed.wait(look_s)
                if self._ended:
                    for one, _ in self._pending:
                        self._finish(one, "the run ended before", done=False)
                results, self._results, ended = self._results, [], self._ended
            for result in results:
                self._result(result)
            if ended:
                self._write_limits()
                return

    def _result(self, result: CommandResult) -> None:
        try:
            write_result(self._run.folder, result)
        except OSError as error:
            _log.warning("cannot write this result of command %d: %s (%s)", result.number, result.text, error)

    def _drop_withdrawn(self) -> None:
        """Drop commands that their callers have withdrawn. Then restore the worker limit and the pause that earlier commands
        have set. A save or a stop that was already requested from the workers still happens."""
        with self._changed:
            waiting = [one for one, _ in self._pending]
        gone = [one.number for one in waiting if read_result(self._run.folder, one.number) is not None]
        if not gone:
            return
        with self._changed:
            self._pending = [(one, at) for one, at in self._pending if one.number not in gone]
        before = standing(self._run.folder)
        self._set(self._limit._replace(workers=before.workers, paused_by=before.paused_by))

    def _set(self, limit: WorkerLimit) -> None:
        """Apply a worker limit or pause. It gets a new serial number, so that the controller reports a pause again even if
        nothing has changed."""
        self._limit = limit._replace(serial=self._limit.serial + 1)
        self._workers.limit(self._limit)

    def _answer_old(self) -> None:
        """Write results for commands that were given while no driver trained the run. Limits and pauses take effect now. Saves
        and stops fail: they must be given again."""
        while self._unanswered:
            number, *rest = self._unanswered
            one = self._read(number)
            if one is not None:
                holds = one.verb in ("pause", "continue", "resize")
                text = "it holds from this start on" if holds else "no driver trained the run then: give it again"
                self._result(CommandResult(number=number, done=holds, step=self._step, text=text))
            self._unanswered = tuple(rest)

    def _read(self, number: int) -> Command | None:
        try:
            return read_command(self._run.folder, number)
        except DamagedFile as error:
            self._result(CommandResult(number=number, done=False, step=self._step, text=str(error)[:2000]))
            return None

    def _write_limits(self) -> None:
        if not self._next:
            return
        try:
            found = standing(self._run.folder)
            limits = Limits(workers=found.workers, paused_by=found.paused_by, before=self._next)
            write_limits(self._run.folder, limits)
        except OSError as error:
            _log.warning("cannot write the worker limit and pause of %s: %s", self._run.folder.url, error)

    def _take_new(self, listed: Sequence[int]) -> None:
        """Read and execute all new commands, in the order of their numbers. ``listed``: numbers of new commands from a listing
        of the folder. They include commands after a missing number."""
        waiting = list(listed)
        while waiting or has_command(self._run.folder, self._next):
            self._next = max(self._next, waiting.pop(0) if waiting else 0)
            one = self._read(self._next)
            self._next += 1
            if one is None:
                continue
            with self._changed:
                refusal, text = self._refusal(one), str(one.workers) if one.verb == "resize" else ""
                step = self._step
                if refusal:
                    self._finish(one, refusal, done=False)
                else:
                    self._pending.append((one, step))
            event = Commanded(step=step, verb=one.verb, caller=one.caller, text=refusal or text, refused=bool(refusal))
            self._workers.post(event)
            if not refusal:
                self._carry_out(one)

    def _refusal(self, one: Command) -> str:
        if one.verb == "save" and self._rests:
            lets = f"`springtide run continue {self._run.id}` lets it train"
            return f"the run is paused, and what it has trained is saved; {lets}"
        return self._why_not(one.workers) if one.verb == "resize" and one.workers else ""

    def _why_not(self, workers: int) -> str:
        """Return the reason why the run cannot train on this number of workers; empty if it can."""
        elastic, shards = self._config.elastic, max(1, self._config.parallel.shards)
        if not elastic.min_workers <= workers <= elastic.max_workers:
            limits = f"elastic.min_workers is {elastic.min_workers} and max_workers {elastic.max_workers}"
            return f"{workers} workers: {limits}; resume the run with others"
        if workers % shards:
            return f"{workers} workers: parallel.shard_workers is {shards}, which must divide them"
        return ""

    def _carry_out(self, one: Command) -> None:
        limit = before = self._limit
        match one.verb:
            case "save":
                self._workers.ask(GroupRequest.SAVE)
            case "stop":
                self._workers.ask(GroupRequest.STOP)
            case "pause" if not limit.paused_by:
                limit = limit._replace(paused_by=one.caller)
            case "continue":
                limit = limit._replace(paused_by="")
            case "resize":
                limit = limit._replace(workers=one.workers)
        if limit != before or one.verb == "pause":
            self._set(limit)
        with self._changed:
            now = _train(self._workers_now)
            now = (
                now if one.workers else f"no limit but elastic.max_workers = {self._config.elastic.max_workers}; {now}"
            )
            if one.verb == "continue":
                self._rests = False
                self._settle("continue", "training continues as soon as there are workers")
                self._settle("pause", "somebody let it continue", done=False)
            elif one.verb == "resize":
                self._settle("resize", now, self._is_small_enough)
            elif one.verb == "pause" and self._rests:
                self._settle("pause", "it was paused already")

    def _ask_again(self) -> None:
        """Repeat a stop or save request that a worker group may have missed while it was starting or ending."""
        with self._changed:
            verbs, unheard, self._unheard = {one.verb for one, _ in self._pending}, self._unheard, False
        if "stop" in verbs:
            self._workers.ask(GroupRequest.STOP)
        elif unheard and "save" in verbs:
            self._workers.ask(GroupRequest.SAVE)


def _train(workers: int) -> str:
    return f"{workers} worker{'s train' if workers > 1 else ' trains'}" if workers else "no workers train at the moment"


def _is_pause(event: Decided) -> bool:
    return event.decision == "stay" and event.is_about_pause
