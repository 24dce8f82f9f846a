"""Only the newest lease may write a run. Each start of a driver or worker group claims the next term by creating a file.

<run>/leases/0003.json       its owner; 3 is its term
             0003.ended      written when the lease ends; a lease without it was lost, or is still active
             0003.committed  written after its first commit
             0003.scratch    written by a driver with --from-scratch: the run begins again at step 0
             0003.rollback   written by a worker group that goes back: older snapshots in memory no longer count
             0003.back       what older leases wrote after the step in it is of a device that computes wrong results

The holder of an older lease that is still alive (network partition, second driver) is refused at its next commit.
Its journal is not: readers take back what it writes in its own segments at the newer start (``tracking/segments.py``).
Only terms are compared, never clocks.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from springtide.config.code import CODE_FIELDS, code_digest, is_sealed, seal
from springtide.config.steps import StepsDone
from springtide.errors import DamagedFile, LeaseOvertaken, RunExists, damaged
from springtide.storage import Folder, to_json
from springtide.storage.folder import first_problem

_log = logging.getLogger(__name__)
_FILE = re.compile(r"(\d{4,})\.json")
_COMMITTED = re.compile(r"(\d{4,})\.committed")
_SCRATCH = re.compile(r"(\d{4,})\.scratch")
_BACK = re.compile(r"(\d{4,})\.back")
_ROLLBACK = re.compile(r"(\d{4,})\.rollback")
_NO_CODE: Mapping[str, str] = {}
FORMAT = 1
"""Increase it when a reader of the previous format would misread or refuse a lease of the new one. A lease without a number is
of format 1."""


@dataclasses.dataclass(frozen=True)
class Lease:
    """A claim on a run."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")
    term: Annotated[int, Field(ge=1)]
    """A fencing token: each claim has a larger one, and the holder of the largest may write."""
    owner: str
    """Id of the driver; its worker groups claim one term after the other under the same owner."""
    host: str
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    begun_s: Annotated[float, Field(ge=0, le=1e11)]
    """When it was claimed, seconds since 1970; for display only, never compared."""
    trains: bool = True
    """False for a driver, which only starts worker groups."""
    process: str = ""
    """Distinguishes the process from a later one with the same pid."""
    driver: Annotated[int, Field(ge=0)] = 0
    """The term of the driver's lease with the same owner; 0 without a driver."""
    code: str = ""
    """Digest of the user's own code that the owner's first claim trusted; empty without one."""
    seal: str = ""
    """Proof that this user trusted ``code`` in this run; others can write the file."""
    groups: Annotated[int, Field(ge=0)] = 0
    """Worker groups before it."""
    losses: Annotated[int, Field(ge=0)] = 0
    """Those of them that were lost: their end was not recorded."""

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.begun_s))
        return f"lease {self.term}, begun {when} by process {self.pid} on {self.host}"


_LEASE = TypeAdapter(Lease)
_STEP = TypeAdapter(Annotated[dict[Literal["step"], Annotated[int, Field(ge=0)]], Field(min_length=1)])


def newest(run: Folder) -> Lease | None:
    """Return the lease that may write; None before the first. Raises DamagedFile if its file is damaged, RunExists if it is in
    another format."""
    numbers = _numbers((run / "leases").names())
    return _read(run, numbers[-1]) if numbers else None


def claim(
    run: Folder,
    owner: str,
    *,
    trains: bool = True,
    again: bool = False,
    ends: int = 0,
    sources: Mapping[str, str] = _NO_CODE,
    yields: bool = False,
) -> Lease:
    """Claim the next term. ``trains``: for a worker group, not only for a driver. ``again``: for an owner that has
    claimed before. ``ends``: the term that the same worker group has held until now. ``sources``: all that
    may run code (``Config.needs_trust``), which is trusted: an unattended resume may run it. ``yields``: another owner may take
    over at once, although this process is alive. The number of requests does not grow with the number of leases.

    A newest lease whose file is damaged counts as lost, but not with ``again``: then another owner may have claimed it.

    Raises RunExists with the holder if another claimed at the same moment, if the holder or its driver is a live
    process of this machine, if the newest lease is in another format, or, with ``again``, if another owner has taken over
    since. Raises FileNotFoundError, with
    ``again``, if the earlier claim is not visible: on this node the run's path is another folder.
    """
    last = _last(run, again)
    if last is None and again:
        raise FileNotFoundError(
            f"this node does not see the driver's claim on {run.url}: is the storage of run.root mounted here?"
        )
    if last and last.owner != owner and (again or _is_held(run, last)):
        raise _held_by(run, last)
    same = last if last and last.owner == owner else None
    code = same.code if same else code_digest(sources)
    number, groups, losses = 1, 0, 0
    if last is None:
        _check_store(run)
    else:
        number, groups, losses = last.term + 1, last.groups, last.losses
        if last.trains and last.term != ends:
            groups += 1
            losses += not (run / "leases").exists(f"{last.term:04d}.ended")
    mine = Lease(
        term=number,
        owner=owner,
        host=socket.gethostname(),
        pid=os.getpid(),
        begun_s=time.time(),
        trains=trains,
        process="" if yields else process_id(os.getpid()),
        driver=same.driver if same else (0 if trains else number),
        code=code,
        seal=same.seal if same else seal(_trust(run, sources, code)) if code else "",
        groups=groups,
        losses=losses,
    )
    try:
        (run / "leases").create(_file(mine.term), to_json({"format": FORMAT, **dataclasses.asdict(mine)}).encode())
    except FileExistsError:
        _check_mine(run, mine)  # it may be our own put, whose answer was lost
    else:
        if not run.has_atomic_create:  # this store may have let two create the same file
            _check_mine(run, mine)
    return mine


def _check_mine(run: Folder, mine: Lease) -> None:
    """Raise RunExists if another process claimed the same term at the same moment."""
    try:
        is_mine = _read(run, mine.term) == mine
    except (DamagedFile, RunExists):
        is_mine = False
    if not is_mine:
        holder = _holder(run, mine.term)
        raise RunExists(f"{run.url} was claimed at the same moment by {holder}; that one continues, this one stops")


def _check_store(run: Folder) -> None:
    """Find out, at a run's first lease, whether the store refuses to create a file that exists; if not, say so."""
    if run.has_atomic_create:
        return
    folder, name = run / "leases", f"probe-{secrets.token_hex(6)}"
    try:
        folder.create(name, b"1")
        try:
            folder.create(name, b"2")
        except FileExistsError:
            return
        finally:
            folder.remove(name)
    except OSError as error:
        _log.warning("%s could not be asked whether it refuses to create a file that exists: %s", run.url, error)
        return
    _log.warning(
        "the store of %s creates a file that exists already (no conditional put): of two drivers that start at the same "
        "moment, the slower one is refused at its first commit, not at once",
        run.url,
    )


def trusted_code(run: Folder, sources: Mapping[str, str]) -> str:
    """Return the digest of the code ``sources`` that this user trusted when the run last started; empty if this user did not:
    somebody else did, elsewhere, or in a copy of the run."""
    last = _last(run) if sources else None
    return last.code if last and last.code and is_sealed(_trust(run, sources, last.code), last.seal) else ""


def _trust(run: Folder, sources: Mapping[str, str], code: str) -> str:
    named = [sources.get(field, "") for field in CODE_FIELDS]
    while named and not named[-1]:  # what a version that knew fewer fields has sealed
        named.pop()
    named += sorted(sources.keys() - {*CODE_FIELDS})  # variables, whose values are in the digest
    return to_json([run.url, *named, code])


def check_free(run: Folder) -> None:
    """Raise RunExists with the holder if a live process of this machine, or its driver, holds the run."""
    last = _last(run)
    if last and _is_held(run, last):
        raise _held_by(run, last)


def why_over(run: Folder) -> str | None:
    """Return why nobody trains the run, as far as its leases say; None if somebody may. A driver that was killed has not said
    that it ended."""
    last = _last(run)
    if last is None:
        return "it has never been trained"
    if has_ended(run, last):
        return f"its last driver has ended (lease {last.driver or last.term}); start it again with --resume"
    if last.trains and not last.driver:
        return "it is trained under torchrun, which hears no commands"
    return None


def has_ended(run: Folder, lease: Lease) -> bool:
    """Return whether the driver of ``lease`` has recorded its end; of a lease without a driver, whether its group has."""
    return (run / "leases").exists(f"{lease.driver or lease.term:04d}.ended")


def check(run: Folder, mine: int, owner: str = "") -> None:
    """Check that lease ``mine`` may still write.

    Raises:
        LeaseOvertaken: ``owner`` itself has claimed a newer lease.
        RunExists: somebody else has claimed a newer lease, or, with ``owner``, the same term: a store without conditional puts
            lets two claim it.
    """
    last = max(_numbers((run / "leases").names()), default=0)
    holder = _owner(run, last) if owner else None
    if last > mine or (last == mine and holder not in (None, owner)):
        kind = LeaseOvertaken if owner and holder == owner else RunExists
        raise kind(f"lease {mine} of {run.url} may not write any more: it is held by {_holder(run, last)}")


def end(run: Folder, term: int) -> None:
    """Record that a lease ended; if it cannot be recorded, the lease counts as lost."""
    try:
        (run / "leases").write(f"{term:04d}.ended", b"")
    except OSError as error:
        _log.warning("the end of lease %d of %s could not be recorded: %s", term, run.url, error)


def note_commit(run: Folder, term: int) -> None:
    """Record that lease ``term`` has committed a checkpoint: the run then begins at step 0 only by request."""
    try:
        (run / "leases").write(f"{term:04d}.committed", b"")
    except OSError as error:
        _log.warning("the first commit of lease %d of %s could not be recorded: %s", term, run.url, error)


def note_scratch(run: Folder, term: int, job: str = "") -> None:
    """Record that lease ``term`` begins the run again at step 0 by request of its user, in ``job``, if it has a name."""
    (run / "leases").write(f"{term:04d}.scratch", job)


def scratch_jobs(run: Folder) -> set[str]:
    """Return the jobs that began the run at step 0; empty text for one without a name, as a group that goes back to there."""
    folder = run / "leases"
    return {folder.read(f"{term:04d}.scratch").decode(errors="replace") for term in _numbers(folder.names(), _SCRATCH)}


def note_gone_back(run: Folder, term: int, step: StepsDone) -> None:
    """Record that lease ``term`` goes back to ``step``: what older leases wrote of later steps no longer counts."""
    (run / "leases").write(f"{term:04d}.back", to_json({"step": step}))


def gone_back(run: Folder) -> list[tuple[int, StepsDone]]:
    """Return the term and the step of each lease that went back, oldest first."""
    folder = run / "leases"
    terms = _numbers(folder.names(), _BACK)
    return [(term, StepsDone(folder.read_as(f"{term:04d}.back", _STEP)["step"])) for term in terms]


def begun_at(run: Folder) -> int:
    """Return the term of the last lease that began the run at step 0 by request; 0 if none did. What older leases wrote
    no longer counts."""
    return max(_numbers((run / "leases").names(), _SCRATCH), default=0)


def has_committed(run: Folder) -> bool:
    """Return whether a lease has recorded a commit since then."""
    names = (run / "leases").names()
    return max(_numbers(names, _COMMITTED), default=0) > max(_numbers(names, _SCRATCH), default=0)


def note_rollback(run: Folder, term: int) -> None:
    """Record that lease ``term`` goes back to a checkpoint: snapshots of older leases no longer count."""
    (run / "leases").write(f"{term:04d}.rollback", b"")


def snapshots_since(run: Folder) -> int:
    """Return the oldest term whose snapshots in memory count."""
    names = (run / "leases").names()
    return max(max(_numbers(names, _SCRATCH), default=0) + 1, max(_numbers(names, _ROLLBACK), default=0))


def losses(run: Folder) -> int:
    """Return the number of worker groups before the newest lease that were lost: their end was not recorded."""
    last = _last(run)
    return last.losses if last else 0


def has_trained(run: Folder, before: int) -> bool:
    """Return whether there was a worker group before lease ``before``."""
    try:
        return _read(run, before).groups > 0
    except DamagedFile as error:
        _log.warning("%s; there may have been a worker group before it", error)
        return True


def _read(run: Folder, number: int) -> Lease:
    """Return the lease of term ``number``. Raises DamagedFile if its file is damaged, RunExists if it is in another format."""
    folder = run / "leases"
    where = folder.where(_file(number))
    values: Any = folder.read_json(_file(number))
    written = values.pop("format", FORMAT) if isinstance(values, dict) else FORMAT
    if written != FORMAT and type(written) is int:
        raise RunExists(
            f"{run.url}: lease {number} is in format {written!r:.40}, this version of springtide reads {FORMAT}: use the "
            f"version that wrote it, or a new run.id ({where})"
        )
    try:
        lease = _LEASE.validate_json(to_json(values))  # a strict dataclass takes no dict
    except ValidationError as error:
        raise damaged(where, f"is not a lease ({first_problem(error)})") from None
    if written != FORMAT or lease.term != number or lease.driver > number:
        raise damaged(where, f"cannot be lease {number}: its term is {lease.term}, its driver's {lease.driver}")
    return lease


def _last(run: Folder, again: bool = False) -> Lease | None:
    """Return ``newest``; one whose file is damaged counts as lost, unless ``again``: then RunExists."""
    try:
        return newest(run)
    except (DamagedFile, FileNotFoundError, IsADirectoryError) as error:
        if again:
            raise RunExists(f"{run.url} may be held by another driver: {error}") from None
        _log.warning("%s; that lease counts as lost, and the next one is claimed", error)
        number = max(_numbers((run / "leases").names()))
        return Lease(number, owner="", host="", pid=0, begun_s=0.0)


def _holder(run: Folder, number: int) -> str:
    """Return a lease as text, for an error, also if it cannot be read."""
    try:
        return str(_read(run, number))
    except (DamagedFile, RunExists, OSError) as error:
        return f"lease {number} ({error})"


def _owner(run: Folder, number: int) -> str | None:
    """Return the owner of a lease; None if it cannot be read: no run ends for that."""
    try:
        return _read(run, number).owner
    except (DamagedFile, FileNotFoundError, IsADirectoryError):
        return None


def _held_by(run: Folder, lease: Lease) -> RunExists:
    if lease.driver not in (0, lease.term):  # its worker groups come and go: the driver is to be stopped
        lease = _driver(run, lease) or lease
    return RunExists(f"{run.url} is held by {lease}; stop that process first, or choose another run.id")


def _numbers(names: Iterable[str], kind: re.Pattern[str] = _FILE) -> list[int]:
    """Return the terms of the leases that have a file of this kind among ``names``, oldest first."""
    return sorted(int(match[1]) for name in names if (match := kind.fullmatch(name)))


def _file(number: int) -> str:
    return f"{number:04d}.json"


def _is_held(run: Folder, last: Lease) -> bool:
    """Return whether the process that claimed ``last``, or its driver, is on this machine and alive."""
    if _is_alive(run, last):
        return True
    if last.driver in (0, last.term):
        return False
    driver = _driver(run, last)
    return driver is not None and _is_alive(run, driver)


def _driver(run: Folder, lease: Lease) -> Lease | None:
    """Return the lease of a worker group's driver; None if it cannot be read."""
    try:
        return _read(run, lease.driver)
    except (DamagedFile, FileNotFoundError, IsADirectoryError) as error:
        _log.warning("%s; that driver's lease counts as lost", error)
        return None


def _is_alive(run: Folder, lease: Lease) -> bool:
    if lease.host != socket.gethostname() or lease.pid == os.getpid():
        return False
    ended = (run / "leases").exists(f"{lease.term:04d}.ended")
    return not ended and process_id(lease.pid) == lease.process != ""


# Which process of this machine has a pid: pids are given again.


def process_id(pid: int) -> str:
    """Return what distinguishes a process of this machine from a later one with its pid: boot id and start time; empty
    if it cannot be read, or the process is a zombie.

    Examples:
        >>> import os
        >>> process_id(os.getpid()) == process_id(os.getpid()) != process_id(1)
        True
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else f"{boot}-{rest[18]}"
    except (OSError, IndexError):
        return ""
