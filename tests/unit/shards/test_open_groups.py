"""Row groups that readers hold open: a bounded number in a process, whatever its readers, and never a wrong one."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from springtide.config import Config
from springtide.dataset import open_dataset
from springtide.errors import CorruptShard
from springtide.shards import TRAIN, SplitReader, check_shard
from springtide.shards.ranges import ByteRange, CheckedRanges, OpenGroups
from springtide.storage import Cache, Folder, digest

GROUPS, SIZE = 600, 4096


class File(NamedTuple):
    name: str
    size_bytes: int
    digest: str


class Seen:
    """A view that is the bytes."""

    def __init__(self, number: int, data: np.ndarray) -> None:
        self.number, self.data, self.num_data_bytes = number, data, len(data)


def reader_of(url: str | Path, cache: Cache | None = None) -> OpenGroups[Seen]:
    """A reader of a file of one row a group, each with its number in it."""
    values = np.zeros((GROUPS, SIZE // 8), dtype=np.int64)
    values[:, -1] = range(GROUPS)
    Folder(url).write("some.bin", values.tobytes())
    sealed = [digest.of_bytes(one.tobytes()) for one in values]
    file = File("some.bin", values.nbytes, "0" * 32)

    def range_of(number: int) -> ByteRange:
        return ByteRange(file, number * SIZE, (number + 1) * SIZE, sealed[number], f"row group {number}")

    return OpenGroups(CheckedRanges(Folder(url), range_of, cache), np.arange(1, GROUPS + 1), Seen)


def read(reader: OpenGroups[Seen], rows: np.ndarray) -> None:
    """Read rows, and check that each is the right one."""
    places = []
    for view, here, index in reader.of(rows):
        assert view.number == rows[here].item() == view.data.view("<i8")[-1]
        assert index.tolist() == [0]
        places += here.tolist()
    assert sorted(places) == list(range(len(rows)))


@pytest.fixture
def few_files() -> Iterator[int]:
    """A limit of open files that is little above those that this process has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    # readers may hold a quarter of it, and three threads an eighth each while they read
    limit = max(used + 150, 3 * used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize("is_cached", [False, True])
def test_more_row_groups_are_read_than_files_may_be_open(tmp_path: Path, is_cached: bool) -> None:
    """A file each, of several readers: a dataset of 1,000 small row groups was called damaged under ulimit -n 1024."""
    url, cache = ("memory://groups", Cache(str(tmp_path), 10**9)) if is_cached else (tmp_path, None)
    readers = [reader_of(url, cache) for _ in range(4)]
    for reader in readers:
        read(reader, np.random.default_rng(0).permutation(GROUPS))  # all in one read
    for begin in range(0, GROUPS, 16):
        for reader in readers:
            read(reader, np.arange(begin, min(begin + 16, GROUPS)))


def test_readers_close_what_others_need_while_these_read(tmp_path: Path, few_files: int) -> None:
    readers = [reader_of(tmp_path) for _ in range(3)]

    def many(number: int) -> None:
        random = np.random.default_rng(number)
        for _ in range(60):
            read(readers[number], random.choice(GROUPS, 40, replace=False))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(many, range(3)))
    assert len(os.listdir("/proc/self/fd")) < few_files - 50


def test_what_is_used_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(tmp_path)
    read(reader, np.arange(100))
    monkeypatch.setattr(Folder, "local_file", None)  # called to open one
    read(reader, np.arange(100)[::-1])


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_that_cannot_be_opened_now_is_no_damaged_dataset(
    tiny: Config, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A run tries again after an error of a store; one of a damaged dataset ends it."""
    dataset = Folder(tiny.shards.dataset)
    manifest, _ = open_dataset(dataset.url)

    def fail(_: Folder, name: str) -> str:
        raise OSError(number, os.strerror(number), name)

    monkeypatch.setattr(Folder, "local_file", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        SplitReader(dataset, manifest, TRAIN).read(np.arange(1))
    with pytest.raises(OSError, match=os.strerror(number)):
        check_shard(dataset, manifest.splits[TRAIN].shards[0])


def test_a_folder_in_the_place_of_a_shard_is_damage(tiny: Config, tmp_path: Path) -> None:
    manifest, _ = open_dataset(tiny.shards.dataset)
    (tmp_path / manifest.splits[TRAIN].shards[0].name).mkdir()
    with pytest.raises(CorruptShard, match=r"row group 0: "):
        SplitReader(Folder(tmp_path), manifest, TRAIN).read(np.arange(1))
