"""Commands to a running run: save, pause, continue, resize, stop. Callers write them as files; the run's driver executes them.

    RUN/control/0000.json         a command, written once by its caller
                0000.done.json    its result, written once: by the driver when the command took effect or was refused,
                                  or by the caller when it timed out and withdrew the command
                limits.json       worker limit and pause that result from the older commands, so that a new driver need not
                                  read the older commands again

Everybody who can write to the run's folder can control the run; there is no other permission. Commands reach the driver even
while its workers restart. A worker limit or a pause stays in force until the next command changes it, even if the driver is
restarted.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import time
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from springtide.checkpoint import leases
from springtide.errors import CommandFailed, ConfigError, DamagedFile, damaged, explain
from springtide.storage import Folder, to_json

Verb = Literal["save", "pause", "continue", "resize", "stop"]
VERBS: tuple[Verb, ...] = get_args(Verb)
_FOLDER = "control"
_NAME = re.compile(r"([0-9]{4,9})(\.done)?\.json")
_LIMITS = "limits.json"
_UNREADABLE = (DamagedFile, FileNotFoundError, IsADirectoryError, PermissionError)
_TRIES = 100
_MOST = 10**9
"""Every command number is below this limit, because the name of a command's file has at most nine digits."""
_MOST_GAP = 10_000
"""Longest gap between two command numbers. Commands are numbered one after another. So a file after a longer gap was not
written by springtide, and is ignored."""
_LOOK_S, _LOOK_AT_STORE_S = 0.2, 2.0
"""Time between two reads of a command's result: in a local folder, and in an object store [s]."""


class Command(BaseModel):
    """A command to a run: the contents of the file that its caller writes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    number: int = Field(ge=0)
    verb: Verb
    workers: int = Field(default=0, ge=0, le=10**6)
    """For ``resize``: the maximum number of workers; 0: as many as the config allows."""
    text: str = Field(default="", max_length=2000, exclude=True)
    """Always empty; only earlier versions wrote it."""
    caller: str = Field(max_length=200)
    """USER@HOST, as the caller reports it; not verified."""
    time_s: float = Field(ge=0, le=1e11, allow_inf_nan=False)
    """Time at which the command was given, by the clock of the caller's machine, in seconds since 1970."""


class CommandResult(BaseModel):
    """The result of a command to a run: the contents of the result file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    number: int = Field(ge=0)
    done: bool
    """True if the command took effect; False if it was refused, failed or was withdrawn."""
    step: int = Field(ge=0)
    """Number of steps done when the command took effect."""
    text: Annotated[str, Field(max_length=2000)]


class Limits(BaseModel):
    """The worker limit and the pause that result from all commands with a number below ``before``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    workers: int = Field(ge=0, le=10**6)
    paused_by: str = Field(max_length=200)
    before: int = Field(ge=0, le=_MOST)


class Standing(NamedTuple):
    """The worker limit and the pause that result from all commands so far, and the commands that are still open."""

    workers: int
    """Maximum number of workers; 0: as many as the config allows."""
    paused_by: str
    """Caller who paused the run; empty if it is not paused."""
    unanswered: tuple[int, ...]
    """Numbers of the commands without a result, ascending."""
    following: int
    """Number of the next command."""


_COMMAND: TypeAdapter[Command] = TypeAdapter(Command)
_RESULT: TypeAdapter[CommandResult] = TypeAdapter(CommandResult)
_LIMITS_OF: TypeAdapter[Limits] = TypeAdapter(Limits)


def has_command(run: Folder, number: int) -> bool:
    """Return True if the file of command ``number`` exists. Costs one request to the store."""
    return (run / _FOLDER).exists(_file(number))


def read_command(run: Folder, number: int) -> Command:
    """Return the command with this ``number``. Raises DamagedFile if its file is missing or unreadable, or contains a command
    with another number."""
    folder = run / _FOLDER
    try:
        found = folder.read_as(_file(number), _COMMAND)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise damaged(folder.where(_file(number)), f"cannot be read ({error})") from None
    if found.number != number:
        raise damaged(folder.where(_file(number)), f"contains command {found.number} instead of {number}")
    return found


def numbers_from(run: Folder, first: int) -> list[int]:
    """Return the numbers of all commands from ``first`` on, ascending. Costs one listing of the folder."""
    return [number for number in _numbers(run)[0] if number >= first]


def write_limits(run: Folder, limits: Limits) -> None:
    """Write ``limits``: the worker limit and the pause that result from all commands with a number below ``limits.before``."""
    (run / _FOLDER).write_json(_LIMITS, limits.model_dump(mode="json"))


def read_result(run: Folder, number: int) -> CommandResult | None:
    """Return the result of a command; None if the command has no result yet. Raises DamagedFile."""
    try:
        return (run / _FOLDER).read_as(_file(number, done=True), _RESULT)
    except FileNotFoundError:
        return None


def write_result(run: Folder, result: CommandResult) -> bool:
    """Write the result of a command. Returns False, and writes nothing, if the command has a result already."""
    try:
        (run / _FOLDER).create(_file(result.number, done=True), to_json(result.model_dump(mode="json")).encode())
    except FileExistsError:
        return False
    return True


def standing(run: Folder) -> Standing:
    """Return the worker limit and the pause that result from all commands to a run so far. Refused, failed, withdrawn and
    damaged commands are ignored."""
    numbers, answered = _numbers(run)
    workers: int | None = None
    paused_by: str | None = None
    try:
        known = (run / _FOLDER).read_as(_LIMITS, _LIMITS_OF)
    except _UNREADABLE:
        known = Limits(workers=0, paused_by="", before=0)
    for number in reversed(numbers):
        if number < known.before or (workers is not None and paused_by is not None):
            break  # older commands are contained in ``limits.json``, or newer ones override them
        try:
            one, result = read_command(run, number), read_result(run, number) if number in answered else None
        except _UNREADABLE:
            continue
        if result is not None and not result.done:
            continue
        if one.verb == "resize" and workers is None:
            workers = one.workers
        elif one.verb in ("pause", "continue") and paused_by is None:
            paused_by = one.caller if one.verb == "pause" else ""
    unanswered = tuple(number for number in numbers if number not in answered)
    limit = known.workers if workers is None else workers
    paused = known.paused_by if paused_by is None else paused_by
    return Standing(limit, paused, unanswered, _following(numbers, answered))


def give(run: Folder, verb: Verb, workers: int = 0) -> Command:
    """Write a command for a run, under the next free number, and return it.

    Raises:
        ConfigError: ``verb`` or ``workers`` is invalid.
        CommandFailed: the run is not being trained, or no number is free.
    """
    if verb not in VERBS:
        raise ConfigError(explain("verb", verb, "is not a command", f"one of: {', '.join(VERBS)}"))
    if not 0 <= workers <= 10**6:
        raise ConfigError(
            explain("workers", workers, "is not a number of workers", "give at least 1, or 0 for no limit")
        )
    if (over := leases.why_over(run)) is not None:
        raise CommandFailed(f"{run.url}: cannot {verb} this run: {over}")
    first = _following(*_numbers(run))
    for number in range(first, min(first + _TRIES, _MOST)):
        one = Command(number=number, verb=verb, workers=workers, caller=_caller(), time_s=time.time())
        try:
            (run / _FOLDER).create(_file(number), to_json(one.model_dump(mode="json")).encode())
            return one
        except FileExistsError:
            continue  # another caller took this number: try the next one
    raise CommandFailed(
        f"{run.url}: cannot create a command file in {_FOLDER} from number {first} on; look at the files there"
    )


def await_result(run: Folder, command: Command, wait_s: float) -> CommandResult:
    """Wait up to ``wait_s`` seconds for the result of a command, and return it. If there is none in this time, withdraw the
    command, so that no driver executes it later. For ``stop``, also wait until the driver has ended; ``wait_s`` limits both.

    Raises:
        CommandFailed: the command was refused, failed, or has no result within ``wait_s``.
    """
    look_s, until_s = _LOOK_S if run.is_local else _LOOK_AT_STORE_S, time.monotonic() + wait_s
    while (result := read_result(run, command.number)) is None:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            why = f"no answer in {wait_s:g} s, so it is withdrawn; the driver is gone, has not looked yet (every few seconds),"
            why += " or is in a long step or save (give --wait more seconds); what has begun is still carried out"
            if write_result(run, CommandResult(number=command.number, done=False, step=0, text=why)):
                raise CommandFailed(f"{command.verb}: {why}")
            continue  # the driver has just written a result, so the command is not withdrawn: read the result
        time.sleep(min(look_s, left_s))
    if not result.done:
        raise CommandFailed(f"{command.verb}: {result.text}")
    while command.verb == "stop" and leases.why_over(run) is None and time.monotonic() < until_s:
        time.sleep(look_s)  # a new driver cannot start until this one has written its report and ended
    return result


class RunControl:
    """Commands to a run that trains on Ray. Anyone who can write to the run's folder can give them. Each method waits until the
    command has taken effect, and returns its result with the step. The methods are idempotent.

    Every method raises CommandFailed if the run is not being trained, if its driver refuses the command, or if there is no
    result within ``wait_s``.
    """

    folder: Folder

    def save(self, wait_s: float = 60.0) -> CommandResult:
        """Write a checkpoint now; training continues.

        Args:
            wait_s: how long to wait for the commit [s].

        Examples:
            >>> st.open_run("runs/live").save().text  # doctest: +SKIP
            'step-0000000040 is committed'
        """
        return self._ask("save", wait_s)

    def pause(self, wait_s: float = 60.0) -> CommandResult:
        """Save, then release all workers until ``unpause``. A driver that is restarted meanwhile also waits.

        Args:
            wait_s: how long to wait until the workers are released [s].

        Examples:
            >>> st.open_run("runs/live").pause().done  # doctest: +SKIP
            True
        """
        return self._ask("pause", wait_s)

    def unpause(self, wait_s: float = 60.0) -> CommandResult:
        """End a ``pause``: training continues as soon as there are workers.

        Args:
            wait_s: how long to wait for the driver's answer [s].

        Examples:
            >>> st.open_run("runs/live").unpause().done  # doctest: +SKIP
            True
        """
        return self._ask("continue", wait_s)

    def resize(self, workers: int, wait_s: float = 60.0) -> CommandResult:
        """Limit the number of workers from now on, also after restarts. A larger worker group shrinks to the limit. Whether a
        smaller one grows to the limit depends on ``elastic.grow``.

        Args:
            workers: maximum number, from elastic.min_workers to elastic.max_workers; 0 lifts the limit.
            wait_s: how long to wait until at most ``workers`` workers train [s].

        Examples:
            >>> st.open_run("runs/live").resize(2).done  # doctest: +SKIP
            True
        """
        return self._ask("resize", wait_s, workers)

    def stop(self, wait_s: float = 60.0) -> CommandResult:
        """Save, and end the run's driver, as Ctrl-C does. The run can be resumed.

        Args:
            wait_s: how long to wait for the stop, and then for the end of the driver [s].

        Examples:
            >>> st.open_run("runs/live").stop().done  # doctest: +SKIP
            True
        """
        return self._ask("stop", wait_s)

    def _ask(self, verb: Verb, wait_s: float, workers: int = 0) -> CommandResult:
        return await_result(self.folder, give(self.folder, verb, workers), wait_s)


def _numbers(run: Folder) -> tuple[list[int], set[int]]:
    """Return the numbers of all commands to a run, ascending, and the set of those numbers that have a result. Numbers after a
    gap of more than ``_MOST_GAP`` are ignored."""
    matches = [match for name in (run / _FOLDER).names() if (match := _NAME.fullmatch(name))]
    found = [(int(one[1]), bool(one[2])) for one in matches if one[0] == _file(int(one[1]), bool(one[2]))]
    end = 0
    for number, _ in sorted(found):
        if number > end + _MOST_GAP:
            break
        end = number + 1
    found = [one for one in found if one[0] < end]
    return sorted(number for number, done in found if not done), {number for number, done in found if done}


def _following(numbers: list[int], answered: set[int]) -> int:
    """Return the number for the next command: one above the highest number of any command or result file."""
    return max([*numbers, *answered], default=-1) + 1


def _file(number: int, done: bool = False) -> str:
    return f"{number:04d}{'.done' if done else ''}.json"


def _caller() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in containers the user id often has no name: use the id
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:200]
