"""A size-limited cache on a node's disk for pieces (byte ranges) of remote files, shared by all processes of the node.

<folder>/springtide-cache-<uid>/    owned by this user; files next to it, and files in it with other names, are not touched
    PIECE         name of 32 hex digits; complete or absent, because it is written as PIECE.part and renamed
    PIECE.part    being fetched, locked by the fetching process; the kernel releases the lock of a killed process
    used          number of bytes of all pieces; locked while it is updated

Each piece is a file and is memory-mapped, not read. So processes share its pages, and an evicted piece stays valid for
processes that have it mapped. After a power failure a renamed file may lack its bytes, so the caller must verify each piece and
``drop`` a bad one.
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
"""An eviction removes pieces until the rest uses this share of the cache's size limit, so that evictions are rare."""

_MOST_DIGITS = 18
"""Most digits of a valid number in the file ``used``; a longer number means that the file is damaged."""

_AT_ONCE = 8
"""Number of pieces that one process fetches in parallel, to overlap the latencies of the store and the disk."""

Fetch = Callable[[str], bytes | memoryview]
"""Function: name of a piece -> its bytes, read from the store. Called from several threads."""


_NOT_KEPT = -1
"""Used in place of the descriptor of a piece's .part file if the piece cannot be written to the disk."""


class Cache:
    """A cache of pieces, which are named by 32 hex digits. Picklable; any number of processes may use one folder."""

    def __init__(self, folder: str, limit_bytes: int) -> None:
        """``folder``: folder in which the cache creates a folder for this user. ``limit_bytes``: size limit of the cache."""
        self._parent, self.limit_bytes = folder, limit_bytes
        self._warned = False

    @property
    def folder(self) -> str:
        """Folder of the cached pieces; each user has one."""
        return os.path.join(self._parent, f"springtide-cache-{os.getuid()}")

    def get(self, names: Sequence[str], fetch: Fetch) -> list[np.ndarray]:
        """Return the pieces, uint8 (size,) each. Fetches pieces that are not in the cache; each is fetched by one process only.

        If the disk is full or cannot be written, or other users can write to the folder, the pieces are fetched but not cached,
        and a warning is logged. Raises ValueError for an invalid name.
        """
        for name in names:
            self._path(name)  # raises ValueError for an invalid name
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
                # waiting for a lock while holding another could deadlock: after the first pass, lock one piece at a time
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
        """Remove the piece ``name`` from the cache."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name of a piece: 32 hex digits")
        return os.path.join(self.folder, name)

    def _make_folder(self) -> None:
        """Create the cache's folder if there is none. Raises PermissionError if another user owns it or can write to it. The
        parent folder may belong to anyone."""
        os.makedirs(self._parent, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.folder, 0o700)
        found = os.lstat(self.folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"{self.folder} is not a folder that only this user can write to")

    def _take(self, name: str, found: dict[str, np.ndarray]) -> bool:
        """Map the piece and add it to ``found``. Returns False if it is not in the cache."""
        try:
            with open(self._path(name), "rb", opener=_open_own) as file:
                os.utime(file.fileno())  # record the time of last use: the least recently used pieces are evicted
                found[name] = np.memmap(file, dtype=np.uint8, mode="r")
        except (OSError, ValueError):  # an empty file cannot be mapped
            return False
        return True

    @contextlib.contextmanager
    def _own(self, name: str, wait: bool) -> Iterator[int | None]:
        """Lock the piece's .part file and yield its descriptor. Yields None if another process has locked it; with ``wait``,
        waits for the lock instead. Yields ``_NOT_KEPT`` if the disk cannot be written."""
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
        """Fetch a piece and cache it if possible. ``part``: descriptor of its locked .part file, or ``_NOT_KEPT``."""
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
                "the cache %s cannot keep what is read (%s), so it is read from the store each time; free space there (the "
                "cache takes at most %.1f GiB), or set feed.cache to another disk",
                self.folder,
                error,
                self.limit_bytes / 2**30,
            )

    @contextlib.contextmanager
    def _counted(self) -> Iterator[IO[str]]:
        """Lock and yield the file ``used``, which holds the number of bytes of all pieces."""
        path = os.path.join(self.folder, _USED)
        with open(path, "a+", encoding="ascii", errors="replace", opener=_open_own) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _make_room(self, part: int, size: int) -> None:
        """Reserve ``size`` bytes: add them to the byte count in ``used``, and extend the file ``part`` to that size. If the
        count exceeds the limit, evict the least recently used pieces."""
        with self._counted() as file:
            file.seek(0)
            text = file.read(_MOST_DIGITS + 1)
            is_number = text.isdecimal() and len(text) <= _MOST_DIGITS
            # in a new folder, or after a crash, the file holds no number: add up the sizes of the pieces again
            used = (int(text) if is_number else self._evict(float("inf"))) + size
            if used > self.limit_bytes:
                used = self._evict(self.limit_bytes * _KEEP - size) + size
            file.truncate(0)
            file.write(str(used))
            os.ftruncate(part, size)  # extend now, so that an eviction by another process includes this piece

    def _evict(self, goal: float) -> int:
        """Remove pieces, least recently used first, until at most ``goal`` bytes are left. Returns the number of bytes left."""
        with os.scandir(self.folder) as entries:
            files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        names = [name for name in files if _NAME.fullmatch(name.removesuffix(_PART))]
        for name in names:
            if name.endswith(_PART):  # an unlocked .part file is from a killed process: ``_own`` locks and removes it
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
    """Open a file of the cache, but never follow a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _lock(path: str, wait: bool) -> int:
    """Create the file ``path`` if it does not exist, lock it, and return a descriptor of it. Raises BlockingIOError if another
    process holds the lock; with ``wait``, waits for the lock instead."""
    while True:
        file = _open_own(path, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(path, file):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # another process renamed or removed this file before it was locked: open ``path`` again


def _is(path: str, file: int) -> bool:
    """Return True if the open file with descriptor ``file`` is the file at ``path``."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
