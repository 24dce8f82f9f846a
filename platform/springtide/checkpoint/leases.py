"""Who may write a run: the newest lease. Each start of a group of workers claims the next number by creating its file.

<run>/leases/0003.json       whose it is; 3 is its term
             0003.ended      written when it ended by itself: what has none was lost, or is still there
             0003.committed  written after its first commit
             0003.scratch    written by a driver that was told to begin the run again at step 0

An older lease that is not dead (a network that parted, a second driver) learns at its next commit that it was fenced off.
Numbers decide, never clocks.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from springtide.errors import RunExists
from springtide.store import Folder

_log = logging.getLogger(__name__)
_FILE = re.compile(r"(\d{4,})\.json")
_COMMITTED = re.compile(r"(\d{4,})\.committed")
_SCRATCH = re.compile(r"(\d{4,})\.scratch")


@dataclasses.dataclass(frozen=True)
class Lease:
    """A claim on a run."""

    term: int
    """A fencing token: each claim has a larger one, and the largest may write."""
    owner: str
    """Of the driver; its groups of workers claim one number after the other under the same owner."""
    host: str
    pid: int
    begun_s: float
    """When, seconds since 1970; shown to people, never compared."""
    trains: bool = True
    """False for a driver, which only starts groups of workers."""
    process: str = ""
    """Tells the process from a later one of the same pid."""
    driver: int = 0
    """The term of the driver under whose owner this is; 0 where there is no driver."""

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.begun_s))
        return f"lease {self.term}, begun {when} by process {self.pid} on {self.host}"


def newest(run: Folder) -> Lease | None:
    """The lease that may write; None before the first."""
    numbers = _numbers((run / "leases").names())
    return Lease(**(run / "leases").read_json(_file(numbers[-1]))) if numbers else None


def claim(run: Folder, owner: str, *, trains: bool = True, again: bool = False) -> Lease:
    """Claim the next number. ``trains``: for a group of workers, not for a driver alone; ``again``: for an owner that has
    claimed before.

    RunExists names the holder when another claimed at the same moment, when the holder or its driver is a process of this
    machine that is alive, or, ``again``, when another owner has taken over since. FileNotFoundError, ``again``, where the
    claim from before cannot be seen: this node has another folder in the place of the run's.
    """
    last = newest(run)
    if last is None and again:
        raise FileNotFoundError(
            f"{run.url} has no claim of its driver as this node sees it: is the storage of run.root mounted here?"
        )
    if last and last.owner != owner and (again or _is_held(run, last)):
        raise RunExists(f"{run.url} is held by {last}; stop that one first, or choose another run.id")
    number = 1 + (last.term if last else 0)
    mine = Lease(
        term=number,
        owner=owner,
        host=socket.gethostname(),
        pid=os.getpid(),
        begun_s=time.time(),
        trains=trains,
        process=_process(os.getpid()),
        driver=(last.driver if last and last.owner == owner else 0) if trains else number,
    )
    try:
        (run / "leases").create(_file(mine.term), json.dumps(dataclasses.asdict(mine)).encode())
    except FileExistsError:
        holder = newest(run)
        if holder != mine:  # a put whose answer was lost finds itself
            raise RunExists(
                f"{run.url} was claimed at the same moment by {holder}; it goes on there, this one stops"
            ) from None
    return mine


def check(run: Folder, mine: int) -> None:
    """RunExists when a newer lease has claimed the run."""
    last = newest(run)
    if last and last.term > mine:
        raise RunExists(f"lease {mine} of {run.url} may not write any more: it is held by {last}")


def end(run: Folder, term: int) -> None:
    """Note that a lease ended by itself; where that cannot be noted it will count as lost."""
    try:
        (run / "leases").write(f"{term:04d}.ended", b"")
    except OSError as error:
        _log.warning("the end of lease %d of %s could not be noted: %s", term, run.url, error)


def note_commit(run: Folder, term: int) -> None:
    """Note that lease ``term`` has committed a checkpoint: the run never begins at step 0 again by itself."""
    try:
        (run / "leases").write(f"{term:04d}.committed", b"")
    except OSError as error:
        _log.warning("the first commit of lease %d of %s could not be noted: %s", term, run.url, error)


def note_scratch(run: Folder, term: int) -> None:
    """Note that lease ``term`` begins the run again at step 0, as its user said."""
    (run / "leases").write(f"{term:04d}.scratch", b"")


def begun_at(run: Folder) -> int:
    """The lease that last began the run at step 0 by request; 0 where none did. What older ones wrote counts no more."""
    return max(_numbers((run / "leases").names(), _SCRATCH), default=0)


def has_committed(run: Folder) -> bool:
    """Whether a lease has noted a commit since then."""
    names = (run / "leases").names()
    return max(_numbers(names, _COMMITTED), default=0) > max(_numbers(names, _SCRATCH), default=0)


def losses(run: Folder) -> int:
    """How many groups of workers before the newest lease did not end by themselves."""
    folder = run / "leases"
    names = set(folder.names())
    lost = [number for number in _numbers(names)[:-1] if f"{number:04d}.ended" not in names]
    return sum(bool(folder.read_json(_file(number))["trains"]) for number in lost)


def has_trained(run: Folder, before: int) -> bool:
    """Whether there was a group of workers before lease ``before``."""
    folder = run / "leases"
    return any(folder.read_json(_file(number))["trains"] for number in _numbers(folder.names()) if number < before)


def _numbers(names: Iterable[str], kind: re.Pattern[str] = _FILE) -> list[int]:
    """Of the leases that have a file of this kind among these names, oldest first."""
    return sorted(int(match[1]) for name in names if (match := kind.fullmatch(name)))


def _file(number: int) -> str:
    return f"{number:04d}.json"


def _is_held(run: Folder, last: Lease) -> bool:
    """Whether the process that claimed ``last``, or the driver it claimed for, is on this machine and alive."""
    if _is_alive(run, last):
        return True
    if last.driver in (0, last.term):
        return False
    return _is_alive(run, Lease(**(run / "leases").read_json(_file(last.driver))))


def _is_alive(run: Folder, lease: Lease) -> bool:
    if lease.host != socket.gethostname() or lease.pid == os.getpid():
        return False
    ended = (run / "leases").exists(f"{lease.term:04d}.ended")
    return not ended and _process(lease.pid) == lease.process != ""


def _process(pid: int) -> str:
    """What a process of this machine is told by from a later one of its pid: when it began; empty where it cannot be seen."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else f"{boot}-{rest[18]}"
    except (OSError, IndexError):
        return ""
