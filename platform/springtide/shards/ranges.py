"""Byte ranges of sealed files, each checked against its digest before it is first used.

local folder      the file is mapped
object storage    one ranged read per range, several in parallel -> the node's cache -> mapped
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from springtide.errors import CorruptShard
from springtide.store import Cache, Folder, digest

_AT_ONCE = 8
_KEPT_BYTES = 256 * 2**20
"""Total size of the row groups that one reader holds open; mapping one again costs microseconds."""
REMEDY = "remove the dataset's folder and run `springtide data prepare` again, or restore the file"


class SealedFile(Protocol):
    """A file, as it was sealed."""

    @property
    def name(self) -> str:
        """Name in its folder."""

    @property
    def size_bytes(self) -> int:
        """Size [bytes]."""

    @property
    def digest(self) -> str:
        """Digest of its bytes."""


class ByteRange(NamedTuple):
    """Bytes [begin, end) of a file."""

    file: SealedFile
    begin: int
    end: int
    digest: str
    what: str
    """What they are, for errors."""


class CheckedRanges:
    """Random access to byte ranges."""

    def __init__(
        self, folder: Folder, range_of: Callable[[int], ByteRange], cache: Cache | None = None, remedy: str = REMEDY
    ) -> None:
        """``range_of``: returns the range with a number; ``cache``: this node's cache for ranges of object storage; without one
        they are read again each time; ``remedy``: what to do about a bad file."""
        self._folder, self._range, self._cache, self._remedy = folder, range_of, cache, remedy
        self._checked: set[int] = set()

    def read(self, numbers: list[int]) -> list[np.ndarray]:
        """Return the bytes of each range, uint8; CorruptShard names a file with changed bytes."""
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
        except (OSError, ValueError) as error:  # ValueError: the file is shorter
            raise self._corrupt(number, str(error)) from error

    def _cached(self, numbers: list[int]) -> list[np.ndarray]:
        assert self._cache is not None
        names = {
            self._range(number).digest: number for number in numbers
        }  # by digest: datasets share a cache and cannot mix up their row groups

        def fetch(name: str) -> bytes | memoryview:
            return self._download(names[name])

        found = dict(zip(names, self._cache.get(list(names), fetch), strict=True))
        bad = [name for name, number in names.items() if not self._is_good(number, found[name])]
        for name in bad:  # after a power failure or on a bad disk: fetch it from the store again
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
    """A view of a row group's rows in its bytes."""

    @property
    def num_data_bytes(self) -> int:
        """Size of the bytes [bytes]."""


_View = TypeVar("_View", bound=View)


class OpenGroups(Generic[_View]):
    """The row groups of a reader, of which those used last stay open."""

    def __init__(self, ranges: CheckedRanges, row_ends: np.ndarray, view: Callable[[int, np.ndarray], _View]) -> None:
        """``row_ends``: rows up to the end of each group, int64 (groups,); ``view`` returns the view of a group, given its
        number and its bytes."""
        self._ranges, self._ends, self._view = ranges, row_ends, view
        self._open: dict[int, _View] = {}

    def of(self, rows: np.ndarray) -> Iterator[tuple[_View, np.ndarray, np.ndarray]]:
        """Yield each group that holds some of ``rows``, int64 (n,), the places of these in ``rows``, and their places in the
        group. CorruptShard names a file with changed bytes."""
        groups = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(groups, kind="stable")
        wanted, begins = np.unique(groups[order], return_index=True)
        self._fetch(wanted.tolist())
        for group, here in zip(wanted.tolist(), np.split(order, begins[1:]), strict=True):
            yield self._open[group], here, rows[here] - (self._ends[group - 1] if group else 0)
        self._forget()

    def _fetch(self, groups: list[int]) -> None:
        """Open these row groups, and mark them as the most recently used."""
        missing = [group for group in groups if group not in self._open]
        for group, data in zip(missing, self._ranges.read(missing), strict=True):
            self._open[group] = self._view(group, data)
        for group in groups:
            self._open[group] = self._open.pop(group)

    def _forget(self) -> None:
        kept = sum(view.num_data_bytes for view in self._open.values())
        while kept > _KEPT_BYTES:
            kept -= self._open.pop(next(iter(self._open))).num_data_bytes


def corruption(folder: Folder, file: SealedFile, what: str, found: str = "", remedy: str = REMEDY) -> CorruptShard:
    """Return the error for a bad file, with the digest expected and what is found."""
    try:
        found = found or digest_of(folder, file)
    except OSError as error:
        found = f"nothing ({error})"
    return CorruptShard(f"{folder.where(file.name)}: {what}; digest expected {file.digest}, found {found}; {remedy}")


def digest_of(folder: Folder, file: SealedFile) -> str:
    """Return the digest of a file as it is now; of one that is too long, which may be by any amount, its size."""
    size = folder.size(file.name)
    if size > file.size_bytes:
        return f"{size} bytes instead of {file.size_bytes}"
    with folder.open(file.name) as opened:
        return digest.of_file(opened)
