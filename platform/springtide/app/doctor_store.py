"""The check of ``springtide doctor`` that measures a store, in a folder of its own that it removes."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from springtide.app.doctor import Check, Status
from springtide.errors import redacted
from springtide.store import Folder

_T = TypeVar("_T")
_LARGE_BYTES = 64 * 2**20
_LEAST_BYTES_PER_S = 20 * 2**20
"""Slower, a checkpoint of a model of 1B parameters (12 GB with its optimizer) takes more than ten minutes."""
_CLOCKS_APART_S = 2.0
_LONGEST_S = 1.0
"""Time of one small request: a commit makes a few in a row."""


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
        >>> from springtide.app.doctor_store import clock_check
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
