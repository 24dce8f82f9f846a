"""Leases: who may write a run. When a driver or a worker group starts, it claims a lease: a file with the next number (the
term). Only the holder of the newest lease may write.

<run>/leases/0003.json       the lease of term 3: owner, host, process
             0003.ended      written when the lease ends; a lease without it was lost, or is still active
             0003.committed  written after the first commit under this lease
             0003.scratch    written with --from-scratch: the run begins again at step 0
             0003.rollback   written by a worker group that rolls back: restores ignore older leases' snapshots
             0003.back       contains a step: a device had computed wrong results, so the run went back to this step;
                             restores ignore later steps that older leases saved

If the holder of an older lease is still alive (network partition, second driver), its next commit fails. It can still write to
the journal (log of events), but only to the files with its own term (its segments). The holder of the newer lease resumes from
some step. Readers of the journal drop later steps from segments of older leases (``tracking/segments.py``). Only terms are
compared, never clocks.
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
"""Format of a lease file. Increase it when a reader of the previous format would misread or refuse a lease of the new format.
A lease file without a format number has format 1."""


@dataclasses.dataclass(frozen=True)
class Lease:
    """A claim on a run by a driver or a worker group. Only the holder of the newest claim may write the run."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")
    term: Annotated[int, Field(ge=1)]
    """Number of the lease. Each new claim has a larger number, and only the holder of the largest number may write (a fencing
    token)."""
    owner: str
    """Random id of the driver, or of a worker group without a driver. A driver's worker groups claim their leases with the
    driver's id."""
    host: str
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    begun_s: Annotated[float, Field(ge=0, le=1e11)]
    """When the lease was claimed, seconds since 1970; for display only, never compared."""
    trains: bool = True
    """True for a lease of a worker group; False for a lease of a driver, which only starts worker groups."""
    process: str = ""
    """Boot id and start time of the process, to distinguish it from a later process with the same pid; empty if unknown."""
    driver: Annotated[int, Field(ge=0)] = 0
    """Number of the lease that the driver claimed for itself; 0 without a driver (under torchrun)."""
    code: str = ""
    """Digest of the user's own code, such as a model. The user allowed this code to run when ``owner`` first claimed the run.
    Empty if the run has no such code."""
    seal: str = ""
    """Signature (HMAC) that proves that this user trusted ``code`` in this run. It is needed because other users may be able to
    write the lease file."""
    groups: Annotated[int, Field(ge=0)] = 0
    """Number of worker groups that trained the run before this lease."""
    losses: Annotated[int, Field(ge=0)] = 0
    """Number of worker groups before this lease that were lost: their end was not recorded."""

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.begun_s))
        return f"lease {self.term}, begun {when} by process {self.pid} on {self.host}"


_LEASE = TypeAdapter(Lease)
_STEP = TypeAdapter(Annotated[dict[Literal["step"], Annotated[int, Field(ge=0)]], Field(min_length=1)])


def newest(run: Folder) -> Lease | None:
    """Return the newest lease, whose holder may write the run; None before the first claim. Raises DamagedFile if its file is
    damaged, RunExists if the file is in another format."""
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
    """Claim the next term (lease number) of a run and return the lease. The number of requests to the store does not grow with
    the number of leases.

    If the newest lease's file is damaged, its holder counts as crashed. With ``again``, RunExists is raised instead: the
    damaged file may be another owner's lease.

    Args:
        run: the run to claim.
        owner: id of the driver, or of a worker group without a driver.
        trains: True for a worker group, False for a driver.
        again: True if ``owner`` has claimed the run before.
        ends: number of the lease that the same worker group has held until now, so that the group is not counted twice; 0 if it
            held no lease.
        sources: settings that may run code of the user (``Config.needs_trust``). The lease records that the user trusts this
            code, so an unattended resume may run it.
        yields: allow another owner to claim the run at any time, although this process is alive. With ``again``, the claim also
            succeeds if another driver has claimed the run since and ended without starting a worker group (``is_left``).

    Raises:
        RunExists: another process claimed the same number at the same moment; the holder of the newest lease, or its driver, is
            a live process of this machine; the newest lease is in another format; or, with ``again``, another owner has claimed
            the run since.
        FileNotFoundError: with ``again``, if this node finds no lease: the run's shared storage is not mounted on this node, so
            the path leads to another folder.
    """
    last = _last(run, again)
    if last is None and again:
        raise FileNotFoundError(
            f"this node does not see the driver's claim on {run.url}: is the storage of run.root mounted here?"
        )
    if last and last.owner != owner and (again or _is_held(run, last)) and not (yields and is_left(run, last)):
        raise _held_by(run, last)
    same = (
        last if last and (last.owner == owner or yields) else None
    )  # with ``yields``, also continue another owner's lease, and keep the code that its user has trusted
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
        _check_mine(run, mine)  # the existing file may be our own: an earlier try wrote it, but its response was lost
    else:
        if not run.has_atomic_create:  # this store may have let two processes create the same file
            _check_mine(run, mine)
    return mine


def _check_mine(run: Folder, mine: Lease) -> None:
    """Raise RunExists if another process claimed the lease with the same number at the same moment."""
    try:
        is_mine = _read(run, mine.term) == mine
    except (DamagedFile, RunExists):
        is_mine = False
    if not is_mine:
        holder = _holder(run, mine.term)
        raise RunExists(f"{run.url} was claimed at the same moment by {holder}, which continues; this process stops")


def _check_store(run: Folder) -> None:
    """At a run's first claim, test whether the store refuses to create a file that exists. Log a warning if it does not
    refuse."""
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
        _log.warning("%s: cannot test whether its store refuses to create a file that exists: %s", run.url, error)
        return
    _log.warning(
        "the store of %s does not refuse to create a file that exists (no conditional put): if two drivers start at "
        "the same moment, the slower driver fails only at its first commit, not at its start",
        run.url,
    )


def trusted_code(run: Folder, sources: Mapping[str, str]) -> str:
    """Return the digest of the code in ``sources`` that this user trusted when the run last started. Empty if there is no such
    trust: another user started the run, or the folder is a copy of another run."""
    last = _last(run) if sources else None
    return last.code if last and last.code and is_sealed(_trust(run, sources, last.code), last.seal) else ""


def _trust(run: Folder, sources: Mapping[str, str], code: str) -> str:
    """Return the text that a lease's seal (HMAC) signs: run URL, the user's functions, names of environment variables, and the
    digest of the code."""
    named = [sources.get(field, "") for field in CODE_FIELDS]
    while named and not named[-1]:  # drop empty fields at the end: seals of versions with fewer fields stay valid
        named.pop()
    named += sorted(sources.keys() - {*CODE_FIELDS})  # names of environment variables; the digest covers their values
    return to_json([run.url, *named, code])


def check_free(run: Folder) -> None:
    """Raise RunExists if the process that holds the newest lease, or its driver, is alive on this machine. The error names the
    process."""
    last = _last(run)
    if last and _is_held(run, last):
        raise _held_by(run, last)


def why_over(run: Folder) -> str | None:
    """Return why no driver can receive commands for the run, for example because the run was never trained. None if a driver
    may be running. Only the leases are read: a killed driver has not recorded its end, so it counts as running."""
    last = _last(run)
    if last is None:
        return "it has never been trained"
    if has_ended(run, last):
        return f"its last driver has ended (lease {last.driver or last.term}); start it again with --resume"
    if last.trains and not last.driver:
        return "it is trained under torchrun, which hears no commands"
    return None


def has_ended(run: Folder, lease: Lease) -> bool:
    """Return True if the driver of ``lease`` has recorded its end. Under torchrun there is no driver: return True if the worker
    group has recorded its end."""
    return (run / "leases").exists(f"{lease.driver or lease.term:04d}.ended")


def is_left(run: Folder, lease: Lease) -> bool:
    """Return True if ``lease`` belongs to a driver that started no worker group and has recorded its end."""
    return not lease.trains and lease.driver in (0, lease.term) and has_ended(run, lease)


def check(run: Folder, mine: int, owner: str = "") -> None:
    """Check that lease ``mine`` may still write the run.

    Raises:
        LeaseOvertaken: ``owner`` itself has claimed a newer lease.
        RunExists: another owner has claimed a newer lease. If ``owner`` is given, also if another owner has claimed a lease
            with the same number, which is possible in a store without conditional puts.
    """
    last = max(_numbers((run / "leases").names()), default=0)
    holder = _owner(run, last) if owner else None
    if last > mine or (last == mine and holder not in (None, owner)):
        kind = LeaseOvertaken if owner and holder == owner else RunExists
        raise kind(f"lease {mine} of {run.url} may not write any more: it is held by {_holder(run, last)}")


def end(run: Folder, term: int) -> None:
    """Record that the holder of lease ``term`` stops writing. If the record cannot be written, the holder counts as crashed."""
    try:
        (run / "leases").write(f"{term:04d}.ended", b"")
    except OSError as error:
        _log.warning("the end of lease %d of %s could not be recorded: %s", term, run.url, error)


def note_commit(run: Folder, term: int) -> None:
    """Record that lease ``term`` has committed a checkpoint. From then on, the run can begin at step 0 only with
    --from-scratch."""
    try:
        (run / "leases").write(f"{term:04d}.committed", b"")
    except OSError as error:
        _log.warning("the first commit of lease %d of %s could not be recorded: %s", term, run.url, error)


def note_scratch(run: Folder, term: int, job: str = "") -> None:
    """Record that lease ``term`` begins the run again at step 0. ``job``: name of the job that requested it, if it has one."""
    (run / "leases").write(f"{term:04d}.scratch", job)


def scratch_jobs(run: Folder) -> set[str]:
    """Return the names of the jobs that began the run again at step 0. The set contains an empty text if a job without a name,
    or a rollback to step 0, did so."""
    folder = run / "leases"
    return {folder.read(f"{term:04d}.scratch").decode(errors="replace") for term in _numbers(folder.names(), _SCRATCH)}


def note_gone_back(run: Folder, term: int, step: StepsDone) -> None:
    """Record that lease ``term`` goes back to ``step``: restores ignore later steps that older leases saved."""
    (run / "leases").write(f"{term:04d}.back", to_json({"step": step}))


def gone_back(run: Folder) -> list[tuple[int, StepsDone]]:
    """Return the term and the step of each lease that went back to an earlier step, oldest first. A lease goes back because a
    device had computed wrong results."""
    folder = run / "leases"
    terms = _numbers(folder.names(), _BACK)
    return [(term, StepsDone(folder.read_as(f"{term:04d}.back", _STEP)["step"])) for term in terms]


def begun_at(run: Folder) -> int:
    """Return the term of the last lease that began the run again at step 0; 0 if none did. Restores ignore states
    that older leases wrote."""
    return max(_numbers((run / "leases").names(), _SCRATCH), default=0)


def has_committed(run: Folder) -> bool:
    """Return True if a lease has recorded a commit since the run last began at step 0 (``begun_at``)."""
    names = (run / "leases").names()
    return max(_numbers(names, _COMMITTED), default=0) > max(_numbers(names, _SCRATCH), default=0)


def note_rollback(run: Folder, term: int) -> None:
    """Record that lease ``term`` rolls back to a checkpoint: restores ignore snapshots of older leases."""
    (run / "leases").write(f"{term:04d}.rollback", b"")


def snapshots_since(run: Folder) -> int:
    """Return the lowest lease number whose snapshots (states in the memory of nodes) may still be restored. A restart at step 0
    or a rollback increases this number."""
    names = (run / "leases").names()
    return max(max(_numbers(names, _SCRATCH), default=0) + 1, max(_numbers(names, _ROLLBACK), default=0))


def losses(run: Folder) -> int:
    """Return how many worker groups were lost before the newest lease: they crashed or were killed, so their end was not
    recorded."""
    last = _last(run)
    return last.losses if last else 0


def has_trained(run: Folder, before: int) -> bool:
    """Return True if a worker group trained before lease ``before``, or if the file of lease
    ``before`` is damaged."""
    try:
        return _read(run, before).groups > 0
    except DamagedFile as error:
        _log.warning("%s; assuming that a worker group trained before this lease", error)
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
        lease = _LEASE.validate_json(to_json(values))  # as JSON text: in strict mode pydantic refuses a dict
    except ValidationError as error:
        raise damaged(where, f"is not a lease ({first_problem(error)})") from None
    if written != FORMAT or lease.term != number or lease.driver > number:
        raise damaged(where, f"cannot be lease {number}: it has term = {lease.term}, driver = {lease.driver}")
    return lease


def _last(run: Folder, again: bool = False) -> Lease | None:
    """Return the ``newest`` lease. If its file is damaged, log a warning and return a lease without an owner, whose holder
    counts as crashed. With ``again``, raise RunExists instead."""
    try:
        return newest(run)
    except (DamagedFile, FileNotFoundError, IsADirectoryError) as error:
        if again:
            raise RunExists(f"{run.url} may be held by another driver: {error}") from None
        _log.warning("%s; the holder of this lease counts as crashed", error)
        number = max(_numbers((run / "leases").names()))
        return Lease(number, owner="", host="", pid=0, begun_s=0.0)


def _holder(run: Folder, number: int) -> str:
    """Return a description of lease ``number`` for an error message, even if the lease's file cannot be read."""
    try:
        return str(_read(run, number))
    except (DamagedFile, RunExists, OSError) as error:
        return f"lease {number} ({error})"


def _owner(run: Folder, number: int) -> str | None:
    """Return the owner of lease ``number``; None if its file is damaged or missing: an unreadable file must not end a run."""
    try:
        return _read(run, number).owner
    except (DamagedFile, FileNotFoundError, IsADirectoryError):
        return None


def _held_by(run: Folder, lease: Lease) -> RunExists:
    if lease.driver not in (0, lease.term):  # name the driver: stopping only its worker group would not free the run
        lease = _driver(run, lease) or lease
    return RunExists(f"{run.url} is held by {lease}; stop that process first, or choose another run.id")


def _numbers(names: Iterable[str], kind: re.Pattern[str] = _FILE) -> list[int]:
    """Return the lease numbers in those file ``names`` that match the pattern ``kind``, ascending: 3 from ``0003.json``."""
    return sorted(int(match[1]) for name in names if (match := kind.fullmatch(name)))


def _file(number: int) -> str:
    return f"{number:04d}.json"


def _is_held(run: Folder, last: Lease) -> bool:
    """Return True if the process that claimed lease ``last``, or its driver, is alive on this machine."""
    if _is_alive(run, last):
        return True
    if last.driver in (0, last.term):
        return False
    driver = _driver(run, last)
    return driver is not None and _is_alive(run, driver)


def _driver(run: Folder, lease: Lease) -> Lease | None:
    """Return the lease of the driver that started the worker group of ``lease``; None if the driver's lease cannot be read."""
    try:
        return _read(run, lease.driver)
    except (DamagedFile, FileNotFoundError, IsADirectoryError) as error:
        _log.warning("%s; the driver with this lease counts as crashed", error)
        return None


def _is_alive(run: Folder, lease: Lease) -> bool:
    if lease.host != socket.gethostname() or lease.pid == os.getpid():
        return False
    ended = (run / "leases").exists(f"{lease.term:04d}.ended")
    return not ended and process_id(lease.pid) == lease.process != ""


# Distinguish a process from a later process with the same pid: the kernel reuses pids.


def process_id(pid: int) -> str:
    """Return the boot id and the start time of process ``pid`` of this machine. A later process with the same pid has others.

    Empty if they cannot be read, or if the process is a zombie.

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
