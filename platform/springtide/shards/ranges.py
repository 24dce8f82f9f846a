"""Read byte ranges of sealed files (complete, never changed). Each range is checked against its digest before its first use.

local folder      the file is mapped into memory
object storage    one ranged read per range, several in parallel -> the node's disk cache -> mapped into memory
"""

from __future__ import annotations

import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from springtide.errors import CorruptShard
from springtide.storage import Cache, Folder, digest

_AT_ONCE = 8
_KEPT_BYTES = 256 * 2**20
"""Most bytes of row groups (Parquet's units of rows) that one reader keeps mapped; mapping one again costs microseconds."""
_MOST_OPEN = 2**14
"""Most row groups that all readers of a process keep mapped: Linux allows a process 65,530 maps."""
_SHARE_OF_FILES = 4
"""Each mapped row group keeps a file open. All readers of a process may open at most 1 / 4 of the files that the process may
open."""
REMEDY = "remove the dataset's folder and run `springtide data prepare` again, or restore the file"


class SealedFile(Protocol):
    """A file of a dataset or of labels, with the size and digest that it had when it was sealed (completed)."""

    @property
    def name(self) -> str:
        """Name of the file in its folder."""

    @property
    def size_bytes(self) -> int:
        """Size of the file when it was sealed [bytes]."""

    @property
    def digest(self) -> str:
        """Digest of the file when it was sealed."""


class ByteRange(NamedTuple):
    """Bytes [begin, end) of a file."""

    file: SealedFile
    begin: int
    end: int
    digest: str
    what: str
    """Name of the bytes in errors, such as ``row group 3``."""


class CheckedRanges:
    """Random access to byte ranges, each checked against its digest when it is first read."""

    def __init__(
        self, folder: Folder, range_of: Callable[[int], ByteRange], cache: Cache | None = None, remedy: str = REMEDY
    ) -> None:
        """``range_of``: function (number of a range) -> the range. ``cache``: this node's disk cache for ranges of object
        storage; None: they are fetched at each read. ``remedy``: remedy in errors about a bad file."""
        self._folder, self._range, self._cache, self._remedy = folder, range_of, cache, remedy
        self._checked: set[int] = set()

    def read(self, numbers: list[int]) -> list[np.ndarray]:
        """Return the bytes of the ranges with these numbers, uint8. Raises CorruptShard, which names the file, if bytes have
        changed."""
        if self._folder.is_local:
            found: list[np.ndarray] = [self._map(number) for number in numbers]
        elif self._cache is None:
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                found = [np.frombuffer(data, dtype=np.uint8) for data in threads.map(self._download, numbers)]
        else:
            found = self._cached(numbers)
        for number, data in zip(numbers, found, strict=True):
            if not self._is_good(number, data):
                raise self._corrupt(number, "does not match its checksum")
        return found

    def _map(self, number: int) -> np.ndarray:
        one = self._range(number)
        try:
            path = self._folder.local_file(one.file.name)
            return np.memmap(path, np.uint8, mode="r", offset=one.begin, shape=(one.end - one.begin,))
        except (FileNotFoundError, IsADirectoryError, ValueError) as error:  # ValueError: the file is too short
            raise self._corrupt(number, str(error)) from error

    def _cached(self, numbers: list[int]) -> list[np.ndarray]:
        assert self._cache is not None
        names = {
            self._range(number).digest: number for number in numbers
        }  # named by digest, so that datasets that share a cache cannot mix up their row groups

        def fetch(name: str) -> bytes | memoryview:
            return self._download(names[name])

        found = dict(zip(names, self._cache.get(list(names), fetch), strict=True))
        bad = [name for name, number in names.items() if not self._is_good(number, found[name])]
        for name in bad:  # damaged in the cache by a power failure or a bad disk: fetch it again
            self._cache.drop(name)
        found |= dict(zip(bad, self._cache.get(bad, fetch), strict=True))
        return [found[self._range(number).digest] for number in numbers]

    def _is_good(self, number: int, data: np.ndarray) -> bool:
        if number not in self._checked and digest.of_bytes(data.data) == self._range(number).digest:
            self._checked.add(number)
        return number in self._checked

    def _download(self, number: int) -> bytes | memoryview:
        one = self._range(number)
        try:
            return self._folder.read_range(one.file.name, one.begin, one.end)
        except FileNotFoundError as error:
            raise self._corrupt(number, "the file is missing") from error
        except Exception as error:  # every object store raises its own errors
            size = self._folder.size(one.file.name)
            if size < one.end:
                raise self._corrupt(number, f"the file ends after {size} of {one.file.size_bytes} bytes") from error
            raise  # an error of the network: a retry may help

    def _corrupt(self, number: int, what: str) -> CorruptShard:
        one = self._range(number)
        return corruption(self._folder, one.file, f"{one.what}: {what}", remedy=self._remedy)


class View(Protocol):
    """Access to the rows of one row group without a copy of the group's bytes."""

    @property
    def num_data_bytes(self) -> int:
        """Size of the group's bytes [bytes]."""


_View = TypeVar("_View", bound=View)


_readers: weakref.WeakSet[OpenGroups[Any]] = weakref.WeakSet()
_lock = threading.Lock()
"""Held while open row groups are reordered and closed, because readers in other threads may close the same row groups."""


class OpenGroups(Generic[_View]):
    """The row groups of a reader. The most recently used row groups stay open."""

    def __init__(self, ranges: CheckedRanges, row_ends: np.ndarray, view: Callable[[int, np.ndarray], _View]) -> None:
        """``row_ends``: total number of rows in a group and all groups before it, int64 (groups,); ``view``: function (number
        of a group, bytes of the group) -> its view."""
        self._ranges, self._ends, self._view = ranges, row_ends, view
        self._open: dict[int, _View] = {}
        with _lock:
            _readers.add(self)

    def of(self, rows: np.ndarray) -> Iterator[tuple[_View, np.ndarray, np.ndarray]]:
        """For each row group that holds some of the row numbers ``rows``, int64 (n,), yield the group's view, the indices of
        the group's rows in ``rows``, and their indices in the group. Raises CorruptShard, which names the file, if bytes have
        changed."""
        groups = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(groups, kind="stable")
        wanted, begins = np.unique(groups[order], return_index=True)
        places = np.split(order, begins[1:])
        most = _most_open()
        at_once = -(-most // 2)  # half: while the cache stores a range, it keeps a second file open
        for first in range(0, len(wanted), at_once):
            some = wanted[first : first + at_once].tolist()
            for group, view, here in zip(some, self._fetch(some, most), places[first : first + at_once], strict=True):
                yield view, here, rows[here] - (self._ends[group - 1] if group else 0)

    def _fetch(self, groups: list[int], most: int) -> list[_View]:
        """Return the views of these row groups, and mark the groups as the most recently used."""
        found = {group: view for group in groups if (view := self._open.get(group)) is not None}
        missing = [group for group in groups if group not in found]
        for group, data in zip(missing, self._ranges.read(missing), strict=True):
            found[group] = self._view(group, data)
        with _lock:
            for group in groups:
                self._open.pop(group, None)
                self._open[group] = found[group]
            kept = sum(view.num_data_bytes for view in self._open.values())
            while kept > _KEPT_BYTES:
                kept -= self._close_oldest()
            if missing:
                _close_all_but(most)
        return [found[group] for group in groups]

    def _close_oldest(self) -> int:
        return self._open.pop(next(iter(self._open))).num_data_bytes


def _most_open() -> int:
    """Return how many row groups all readers together may keep open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if soft == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN, soft // _SHARE_OF_FILES))


def _close_all_but(most: int) -> None:
    """Close row groups until all readers together keep at most ``most`` open. The reader with the most open groups closes its
    least recently used groups first."""
    over = sum(len(reader._open) for reader in _readers) - most
    while over > 0:
        reader = max(_readers, key=lambda one: len(one._open))
        for _ in range(min(over, -(-len(reader._open) // 2))):
            reader._close_oldest()
            over -= 1


def corruption(folder: Folder, file: SealedFile, what: str, found: str = "", remedy: str = REMEDY) -> CorruptShard:
    """Return the error for a bad file, with the digest that was expected and the digest that was found."""
    try:
        found = found or digest_of(folder, file)
    except OSError as error:
        found = f"nothing ({error})"
    return CorruptShard(f"{folder.where(file.name)}: {what}; digest expected {file.digest}, found {found}; {remedy}")


def digest_of(folder: Folder, file: SealedFile) -> str:
    """Return the digest that a file has now. If the file is longer than when it was sealed, return its size as text instead: it
    may be too long to read."""
    size = folder.size(file.name)
    if size > file.size_bytes:
        return f"{size} bytes instead of {file.size_bytes}"
    with folder.open(file.name) as opened:
        return digest.of_file(opened)
