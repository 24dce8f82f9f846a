"""Checks of this machine before it trains: each has a figure, a limit and a remedy, and none can hang the others."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from springtide.api import doctor_checks as checks
from springtide.api.doctor_checks import Check, Status
from springtide.api.doctor_gpus import gpus, torch_and_gloo
from springtide.errors import ConfigError, explain, redacted
from springtide.storage import Folder

if TYPE_CHECKING:  # Ray loads only when needed
    from springtide.ray.cluster.upload import Upload

_USUAL_S = 20.0
"""Time after which a check is cut off: all but the measured ones take milliseconds."""
_T = TypeVar("_T")
_LARGE_BYTES = 64 * 2**20
_LEAST_BYTES_PER_S = 20 * 2**20
"""Slower, a checkpoint of a model of 1B parameters (12 GB with its optimizer) takes more than ten minutes."""
_CLOCKS_APART_S = 2.0
_LONGEST_S = 1.0
"""Time of one small request: a commit makes a few in a row."""
_USUAL_BYTES = 10 * 2**20
"""A folder of code and settings is smaller; larger ones hold data by mistake."""
_MIB = 2**20
_NAMED = 12
"""Names that a line has."""


class CheckPlan(NamedTuple):
    """A check that is still to be made."""

    name: str
    make: Callable[[], Sequence[Check]]
    timeout_s: float = _USUAL_S


def doctor(
    store: str = "",
    root: str = "runs",
    environment: Mapping[str, str] | None = None,
    upload: str = "",
) -> Iterator[Check]:
    """Check this machine, and yield what each check found, as soon as it has.

    Args:
        store: folder or URL to measure, as ``run.root``; empty measures none. What is written there is removed.
        root: local folder of runs, whose disk must have room.
        environment: variables to check; None: those of this process.
        upload: folder that is to be submitted as the working directory of a Ray job; empty looks at none.

    Raises:
        ConfigError: ``store`` is not a URL that is opened here, or ``upload`` is not a folder.
    """
    variables = dict(os.environ if environment is None else environment)
    plans = [
        CheckPlan("versions", checks.versions),
        CheckPlan("devices", lambda: gpus(variables)),
        CheckPlan("memory", checks.memory),
        CheckPlan("shared memory", checks.shared_memory),
        CheckPlan("open files", checks.open_files),
        CheckPlan("disk", lambda: checks.disks(root)),
        CheckPlan("environment", lambda: [*checks.variables(variables), *checks.proxies(variables)]),
        CheckPlan("Ray", lambda: checks.ray_access(variables)),
        CheckPlan("torch and gloo", lambda: torch_and_gloo(variables), 90.0),
    ]
    if store:
        plans.append(CheckPlan("store", StoreCheck(store).make, 180.0))
    if upload:
        plans.append(CheckPlan("upload", UploadCheck(upload).make))
    for plan in plans:
        yield from carry_out(plan)


def carry_out(plan: CheckPlan) -> list[Check]:
    """Return what a check found. One that raises has failed; one that hangs is cut off and left behind."""
    found: list[Check] = []

    def make() -> None:
        try:
            found.extend(plan.make())
        except Exception as error:  # a broken driver or client may raise anything; the other checks are still worth it
            text = redacted(f"{type(error).__name__}: {error}")[:300]
            found.append(Check(plan.name, "fail", f"the check ended with {text}", "", "repair what it names"))

    thread = threading.Thread(target=make, name=f"springtide-doctor-{plan.name}", daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(plan.timeout_s)
    if thread.is_alive():
        figure = f"no answer in {time.monotonic() - began:.0f} s: cut off"
        return [
            Check(plan.name, "fail", figure, f"{plan.timeout_s:g} s", "something hangs: a driver, a mount, a network")
        ]
    return found


class StoreCheck:
    """Measures one store."""

    def __init__(self, url: str) -> None:
        """``url``: as ``run.root``. Raises ConfigError if it is not opened here."""
        self._folder = Folder(url) / f"doctor-{secrets.token_hex(8)}"

    def make(self) -> list[Check]:
        """Write, read, list and remove a small object and one of 64 MiB, and try a conditional put."""
        where, path = redacted(self._folder.url), Path(self._folder.path)
        made = [one for one in path.parents if not one.exists()] if self._folder.is_local else []
        try:
            found = [*self._small(), *self._large(), self._conditional(), *self._clock()]
        except OSError as error:
            remedy = "credentials, the URL, quota, the network, this machine's clock"
            found = [
                Check("store", "fail", redacted(f"{where}: {error}")[:400], "a folder that can be written", remedy)
            ]
        try:
            self._folder.remove()
            left = self._folder.names()
        except OSError as error:
            left = [str(error)[:100]] if found[0].status != "fail" else []  # then there may be nothing to remove
        for one in made:  # the store's own folder, if it was not there before
            with contextlib.suppress(OSError):
                one.rmdir()
        if left:
            found.append(
                Check("store, delete", "warn", f"{where} could not be removed", "", "remove it; allow deletes")
            )
        return found

    def _small(self) -> list[Check]:
        times = {
            "write": _timed(lambda: self._folder.write("small", b"x" * 100)),
            "read": _timed(lambda: self._folder.read("small")),
            "list": _timed(self._folder.names),
            "delete": _timed(lambda: self._folder.remove("small")),
        }
        found = []
        for name, (took_s, answer) in times.items():
            is_right = {"read": answer == b"x" * 100, "list": answer == ["small"]}.get(name, True)
            slow = took_s > _LONGEST_S
            remedy = "a nearer store" if slow else "" if is_right else "its answer is wrong: do not use this store"
            status: Status = "fail" if not is_right else "warn" if slow else "ok"
            found.append(Check(f"store, {name}", status, f"{took_s * 1000:.0f} ms", f"{_LONGEST_S:g} s", remedy))
        return found

    def _large(self) -> list[Check]:
        data = secrets.token_bytes(2**20) * (_LARGE_BYTES // 2**20)
        write_s, _ = _timed(lambda: self._folder.write("large", data))
        read_s, answer = _timed(lambda: self._folder.read("large"))
        self._folder.remove("large")
        if answer != data:
            return [Check("store, 64 MiB", "fail", "reads other bytes than were written", "", "do not use this store")]
        found = []
        for name, took_s in (("write", write_s), ("read", read_s)):
            speed = _LARGE_BYTES / max(took_s, 1e-9)
            slow = speed < _LEAST_BYTES_PER_S
            limit, remedy = f"{_LEAST_BYTES_PER_S / 2**20:g} MiB/s", "a nearer store, a faster network" if slow else ""
            figure = f"{speed / 2**20:.0f} MiB/s"
            found.append(Check(f"store, {name} 64 MiB", "warn" if slow else "ok", figure, limit, remedy))
        return found

    def _clock(self) -> list[Check]:
        before_s = time.time()
        self._folder.write("clock", b"1")
        return clock_check(self._folder.written_s("clock"), before_s, time.time())

    def _conditional(self) -> Check:
        name = "store, conditional put"
        self._folder.create("once", b"1")
        try:
            self._folder.create("once", b"2")
        except FileExistsError:
            return Check(name, "ok", "a file that exists is not created again")
        remedy = "never start two drivers of one run; the slower is refused only at its first commit"
        return Check(name, "warn", "a file that exists is created again", "If-None-Match, which leases use", remedy)


def clock_check(told_s: float, before_s: float, after_s: float) -> list[Check]:
    """Return how far the store's clock is from this machine's, at least; nothing if the store tells no time.

    Args:
        told_s: when the store says that a file was written; it may have cut the fraction of a second.
        before_s: before the write, by this machine's clock.
        after_s: after it.

    Examples:
        >>> from springtide.api.doctor import clock_check
        >>> clock_check(1000.0, 1000.2, 1000.9)[0].figure
        'differs by less than 2 s'
        >>> [one] = clock_check(1090.0, 1000.2, 1000.9)
        >>> one.status, one.figure
        ('warn', 'is 89 s ahead of this machine')
    """
    if not math.isfinite(told_s):
        return []
    ahead, behind = told_s - after_s, before_s - (told_s + 1.0)
    apart = max(ahead, behind)
    if apart <= _CLOCKS_APART_S:
        return [
            Check(
                "store, clock", "ok", f"differs by less than {math.ceil(max(apart, 0.0) + after_s - before_s + 1.0)} s"
            )
        ]
    figure = f"is {apart:.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine"
    remedy = "chrony or ntpd on this machine; times in the journal are its own, and S3 refuses requests 15 min off"
    return [Check("store, clock", "warn", figure, f"{_CLOCKS_APART_S:g} s", remedy)]


def _timed(call: Callable[[], _T]) -> tuple[float, _T]:
    began = time.perf_counter()
    answer = call()
    return time.perf_counter() - began, answer


def _not_sent(found: Upload) -> Iterator[Check]:
    """Yield what a job will not find of its folder, and the links that lead out of it."""
    if found.left_out:
        counts = {
            name: f" ({count:,} file{'s' * (count != 1)})" * name.endswith("/")
            for name, count in found.left_out.items()
        }
        names = _some([f"{name}{count}" for name, count in counts.items()])
        yield Check("upload, left out", "ok", f"by .gitignore, .rayignore or Ray's own list: {names}")
    if found.links:
        names = _some([f"{name} -> {target}" for name, target in found.links.items()])
        remedy = "what they lead to is sent, whatever its size; put a copy in their place, or name them in .rayignore"
        yield Check("upload, links", "warn", f"out of the folder: {names}", "none", remedy)


def _some(names: list[str]) -> str:
    more = [f"and {len(names) - _NAMED} more"] * (len(names) > _NAMED)
    return ", ".join(names[:_NAMED] + more)


class UploadCheck:
    """Looks at a folder as ``ray job submit --working-dir`` would."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError if it is not a folder."""
        if not Path(folder).is_dir():
            raise ConfigError(explain("--upload", folder, "is not a folder", "name what you give --working-dir"))
        self._folder = folder

    def make(self) -> list[Check]:
        """Measure what would be sent, and compare the folder with its git commit."""
        from springtide.ray.cluster.upload import upload_of  # Ray loads only when needed

        found = upload_of(self._folder)
        size = found.num_bytes
        status: Status = "fail" if size >= found.refused_bytes else "warn" if size > _USUAL_BYTES else "ok"
        largest = ", ".join(f"{name} {one / _MIB:.2f}" for name, one in found.largest())
        figure = f"{len(found.sizes)} files, {size / _MIB:.2f} MiB; largest: {largest or 'nothing'}"
        limit = f"usually under {_USUAL_BYTES / _MIB:g} MiB; Ray refuses {found.refused_bytes / _MIB:g} MiB"
        remedy = "name what a job does not need in .rayignore" if status != "ok" else ""
        return [Check("upload", status, figure, limit, remedy), *_not_sent(found), self._commit()]

    def _commit(self) -> Check:
        from springtide.api.provenance import checkout

        found = checkout(self._folder)
        if not found.commit:
            return Check("upload, commit", "ok", "the folder is in no git checkout")
        commit = found.commit[:12]
        if not found.is_changed:
            return Check("upload, commit", "ok", f"{commit}, unchanged")
        remedy = "commit first: the job has no .git, so nothing can say later what it ran"
        return Check("upload, commit", "warn", f"{commit}, with changes that are not committed", "no changes", remedy)
