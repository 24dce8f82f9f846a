"""A folder on a node's disk that keeps pieces of remote files for all processes of the node, up to a number of bytes.

<folder>/springtide-cache-<uid>/    of this user alone; nothing beside it is touched, nor what has another name in it
    PIECE         32 hex digits: whole, or not there: written beside and renamed
    PIECE.part    being fetched, locked by who fetches it; the lock of a killed process is free
    used          bytes of all pieces, and the lock of those who count

A piece is a file of its own and is mapped, not read: processes share its pages, and one that was evicted lives on for those
who have it mapped. Power may fail between a rename and its bytes, so who takes a piece checks it and drops a bad one.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import numpy as np

_log = logging.getLogger(__name__)

_NAME = re.compile("[0-9a-f]{32}")
_PART = ".part"
_USED = "used"
_KEEP = 0.9
"""An eviction goes on down to this share of the limit, so that it is rare."""

_MOST_DIGITS = 18
"""Of the bytes used; a longer number is none."""

_AT_ONCE = 8
"""Pieces that one process fetches side by side: the store's latency and the disk's then hide each other."""

Fetch = Callable[[str], bytes | memoryview]
"""The name of a piece -> its bytes; called from threads."""


_NOT_KEPT = -1
"""Stands for the file of a piece that the disk has no place for."""


class Cache:
    """Pieces by name, 32 hex digits. Picklable; any number of processes may use one folder."""

    def __init__(self, folder: str, limit_bytes: int) -> None:
        """``folder``: where the cache makes one of its own."""
        self._parent, self.limit_bytes = folder, limit_bytes
        self._warned = False

    @property
    def folder(self) -> str:
        """Where the pieces of this process's user lie."""
        return os.path.join(self._parent, f"springtide-cache-{os.getuid()}")

    def get(self, names: Sequence[str], fetch: Fetch) -> list[np.ndarray]:
        """The pieces, uint8 (size,) each; those that the node does not have are fetched, each by one process.

        Where the disk is full or cannot be written, or the folder is open to others, pieces are handed on without being kept,
        and a warning says what to do. ValueError for a name that is none.
        """
        for name in names:
            self._path(name)
        try:
            self._make_folder()
        except OSError as error:
            self._warn(error)
            with ThreadPoolExecutor(_AT_ONCE, "springtide-cache") as threads:
                return [np.frombuffer(data, dtype=np.uint8) for data in threads.map(fetch, names)]
        found: dict[str, np.ndarray] = {}
        wait = False
        while left := [name for name in names if not (name in found or self._take(name, found))]:
            with contextlib.ExitStack() as locks:
                parts: dict[str, int] = {}
                # who waits holds no other piece, or two could wait for each other
                for name in left[:1] if wait else left:
                    part = locks.enter_context(self._own(name, wait))
                    if part is not None and not self._take(name, found):
                        parts[name] = part
                with ThreadPoolExecutor(_AT_ONCE, "springtide-cache") as threads:
                    fetched = threads.map(self._fetch, parts, parts.values(), itertools.repeat(fetch))
                    found |= dict(zip(parts, fetched, strict=True))
            wait = True
        return [found[name] for name in names]

    def drop(self, name: str) -> None:
        """Remove a piece that turned out to be bad."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a piece: 32 hex digits")
        return os.path.join(self.folder, name)

    def _make_folder(self) -> None:
        """Have a folder that nobody else can write to; PermissionError where it is another's. The parent may be anyone's."""
        os.makedirs(self._parent, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.folder, 0o700)
        found = os.lstat(self.folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"{self.folder} is no folder that only this user can write to")

    def _take(self, name: str, found: dict[str, np.ndarray]) -> bool:
        try:
            with open(self._path(name), "rb", opener=_open_own) as file:
                os.utime(file.fileno())  # the last use, which eviction goes by
                found[name] = np.memmap(file, dtype=np.uint8, mode="r")
        except (OSError, ValueError):  # an empty file cannot be mapped
            return False
        return True

    @contextlib.contextmanager
    def _own(self, name: str, wait: bool) -> Iterator[int | None]:
        """The file that the piece is written to, locked; None while another process has it, unless told to ``wait``."""
        path = self._path(name) + _PART
        try:
            part = _lock(path, wait)
        except BlockingIOError:
            yield None
            return
        except OSError as error:
            self._warn(error)
            yield _NOT_KEPT
            return
        try:
            yield part
        finally:
            if _is(path, part):
                os.unlink(path)
            os.close(part)

    def _fetch(self, name: str, part: int, fetch: Fetch) -> np.ndarray:
        data = fetch(name)
        if part != _NOT_KEPT:
            try:
                self._make_room(part, len(data))
                with open(part, "wb", closefd=False) as file:
                    file.write(data)
                with self._counted():
                    os.rename(self._path(name) + _PART, self._path(name))
                found: dict[str, np.ndarray] = {}
                if self._take(name, found):
                    return found[name]
            except OSError as error:
                self._warn(error)
        return np.frombuffer(data, dtype=np.uint8)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "the cache %s cannot keep what is read (%s), so it is read from the store each time; make room there (at most "
                "%.1f GiB are used), or set feed.cache to another disk",
                self.folder,
                error,
                self.limit_bytes / 2**30,
            )

    @contextlib.contextmanager
    def _counted(self) -> Iterator[IO[str]]:
        """The file that counts the bytes used, locked."""
        path = os.path.join(self.folder, _USED)
        with open(path, "a+", encoding="ascii", errors="replace", opener=_open_own) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _make_room(self, part: int, size: int) -> None:
        """Count ``size`` bytes more, and give ``part`` that size; over the limit, remove what was used longest ago."""
        with self._counted() as file:
            file.seek(0)
            text = file.read(_MOST_DIGITS + 1)
            is_number = text.isdecimal() and len(text) <= _MOST_DIGITS
            # what is no number, in a new folder or after a crash, is counted anew
            used = (int(text) if is_number else self._evict(float("inf"))) + size
            if used > self.limit_bytes:
                used = self._evict(self.limit_bytes * _KEEP - size) + size
            file.truncate(0)
            file.write(str(used))
            os.ftruncate(part, size)  # from now on it counts in an eviction

    def _evict(self, goal: float) -> int:
        """Remove pieces until at most ``goal`` bytes are left; returns how many are."""
        with os.scandir(self.folder) as entries:
            files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        names = [name for name in files if _NAME.fullmatch(name.removesuffix(_PART))]
        for name in names:
            if name.endswith(_PART):  # of a process that was killed, unless it is locked
                with self._own(name.removesuffix(_PART), wait=False):
                    pass
        found = []
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found.append((os.lstat(os.path.join(self.folder, name)), name))
        left = sum(info.st_size for info, _ in found)
        for info, name in sorted(found, key=lambda piece: piece[0].st_mtime_ns):
            if left <= goal:
                break
            if not name.endswith(_PART):
                self.drop(name)
                left -= info.st_size
        return left


def _open_own(path: str, flags: int) -> int:
    """Open a file of the cache, and never what a link of its name points to."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _lock(path: str, wait: bool) -> int:
    """A descriptor of the file at ``path``, made if need be and locked; BlockingIOError where that would have to wait."""
    while True:
        file = _open_own(path, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(path, file):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # it was finished or given up meanwhile: what we locked has another name, or none


def _is(path: str, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
