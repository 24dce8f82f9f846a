"""Read rows from sealed shards. Each row group is checked against the manifest before its first row is used.

local dataset     the shard is mapped                 only the requested rows are copied
object storage    one ranged read per row group, several in parallel -> the node's cache -> mapped
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from springtide.errors import CorruptShard
from springtide.shards.manifest import Manifest, RowGroup, Shard
from springtide.shards.row_group import RowGroupView, Rows
from springtide.store import Cache, Folder, digest

_KEPT_BYTES = 256 * 2**20
"""Total size of the row groups that one reader holds open; mapping one again costs microseconds."""
_AT_ONCE = 8


class SplitReader:
    """Random access to the rows of one split."""

    def __init__(self, dataset: Folder, manifest: Manifest, split: str, cache: Cache | None = None) -> None:
        """``cache``: this node's cache for row groups of object storage; without one they are read again each time."""
        self._dataset, self._manifest, self._cache = dataset, manifest, cache
        shards = manifest.splits[split].shards
        self._places = [(shard, index) for shard in shards for index in range(len(shard.groups))]
        self._ends = np.cumsum([group.rows for shard in shards for group in shard.groups])
        self._open: dict[int, RowGroupView] = {}
        self._checked: set[int] = set()

    def read(self, rows: np.ndarray) -> Rows:
        """Return the rows with numbers ``rows``, int64 (n,), in that order; CorruptShard names a shard with changed bytes."""
        groups = np.searchsorted(self._ends, rows, side="right")
        found = Rows(
            np.empty(len(rows), dtype=np.int64),
            np.empty(len(rows), dtype=np.int32),
            np.empty((len(rows), self._manifest.sequence_length + 1), dtype=self._manifest.memory_type),
        )
        order = np.argsort(groups, kind="stable")
        wanted, begins = np.unique(groups[order], return_index=True)
        self._fetch(wanted.tolist())
        for group, here in zip(wanted.tolist(), np.split(order, begins[1:]), strict=True):
            index = rows[here] - (self._ends[group] - self._group(group).rows)
            for column, stored in zip(found, self._open[group].take(index), strict=True):
                column[here] = stored
        self._forget()
        return found

    def _fetch(self, groups: list[int]) -> None:
        """Open these row groups, and mark them as the most recently used."""
        missing = [group for group in groups if group not in self._open]
        for group, data in zip(missing, self._bytes(missing), strict=True):
            self._open[group] = RowGroupView(
                data, self._group(group), self._manifest.token_type, self._manifest.memory_type
            )
        for group in groups:
            self._open[group] = self._open.pop(group)

    def _forget(self) -> None:
        kept = sum(view.num_data_bytes for view in self._open.values())
        while kept > _KEPT_BYTES:
            kept -= self._open.pop(next(iter(self._open))).num_data_bytes

    def _group(self, number: int) -> RowGroup:
        shard, index = self._places[number]
        return shard.groups[index]

    def _bytes(self, groups: list[int]) -> list[np.ndarray]:
        """Return the bytes of each row group; the first time, their digest is checked."""
        if self._dataset.is_local:
            found: list[np.ndarray] = [self._map(group) for group in groups]
        elif self._cache is None:
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                found = [np.frombuffer(data, dtype=np.uint8) for data in threads.map(self._download, groups)]
        else:
            found = self._cached(groups)
        for group, data in zip(groups, found, strict=True):
            if not self._is_good(group, data):
                raise self._corrupt(group, "does not match its checksum")
        return found

    def _map(self, number: int) -> np.ndarray:
        shard, index = self._places[number]
        group = shard.groups[index]
        try:
            path = self._dataset.local_file(shard.name)
            return np.memmap(path, np.uint8, mode="r", offset=group.sample_ids, shape=(group.end - group.sample_ids,))
        except (OSError, ValueError) as error:  # ValueError: the file is shorter
            raise self._corrupt(number, str(error)) from error

    def _cached(self, groups: list[int]) -> list[np.ndarray]:
        assert self._cache is not None
        names = {
            self._group(group).digest: group for group in groups
        }  # by digest: datasets share a cache and cannot mix up their row groups

        def fetch(name: str) -> bytes | memoryview:
            return self._download(names[name])

        found = dict(zip(names, self._cache.get(list(names), fetch), strict=True))
        bad = [name for name, group in names.items() if not self._is_good(group, found[name])]
        for name in bad:  # after a power failure or on a bad disk: fetch it from the store again
            self._cache.drop(name)
        found |= dict(zip(bad, self._cache.get(bad, fetch), strict=True))
        return [found[self._group(group).digest] for group in groups]

    def _is_good(self, group: int, data: np.ndarray) -> bool:
        if group not in self._checked and digest.of_bytes(data.data) == self._group(group).digest:
            self._checked.add(group)
        return group in self._checked

    def _download(self, number: int) -> bytes | memoryview:
        (shard, _), group = self._places[number], self._group(number)
        try:
            return self._dataset.read_range(shard.name, group.sample_ids, group.end)
        except FileNotFoundError as error:
            raise self._corrupt(number, "the file is missing") from error
        except Exception as error:  # every object store raises its own errors
            size = self._dataset.size(shard.name)
            if size < group.end:
                raise self._corrupt(number, f"the file ends after {size} of {shard.size_bytes} bytes") from error
            raise  # an error of the network: a retry may help

    def _corrupt(self, number: int, what: str) -> CorruptShard:
        shard, index = self._places[number]
        return corruption(self._dataset, shard, f"row group {index}: {what}")


def check_shard(dataset: Folder, shard: Shard) -> None:
    """Raise CorruptShard if the file's bytes differ from those that were sealed."""
    try:
        found = _digest(dataset, shard)
    except OSError as error:
        raise CorruptShard(f"{dataset.where(shard.name)}: cannot be read ({error}); {_REMEDY}") from error
    if found != shard.digest:
        raise corruption(dataset, shard, "its bytes changed after sealing", found)


def corruption(dataset: Folder, shard: Shard, what: str, found: str = "") -> CorruptShard:
    """Return the error for a bad shard, with the digest expected and what is found."""
    try:
        found = found or _digest(dataset, shard)
    except OSError as error:
        found = f"nothing ({error})"
    path = dataset.where(shard.name)
    return CorruptShard(f"{path}: {what}; digest expected {shard.digest}, found {found}; {_REMEDY}")


def _digest(dataset: Folder, shard: Shard) -> str:
    """Return the digest of a shard's file as it is now; of a file that is too long, which may be by any amount, its size."""
    size = dataset.size(shard.name)
    if size > shard.size_bytes:
        return f"{size} bytes instead of {shard.size_bytes}"
    with dataset.open(shard.name) as file:
        return digest.of_file(file)


_REMEDY = "remove the dataset's folder and run `springtide data prepare` again, or restore the file"
