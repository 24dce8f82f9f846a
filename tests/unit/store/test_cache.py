"""The cache of a node: a piece is fetched once, killed processes hold up nobody, the limit holds, a full disk stops nothing."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.store import Cache

SIZE = 10_000
SmallDisk = Callable[[Path, list[str]], "subprocess.CompletedProcess[str]"]


def piece(name: str) -> bytes:
    """What the store has under ``name``."""
    return np.random.default_rng(int(name)).bytes(SIZE)


class Store:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, name: str) -> bytes:
        self.asked.append(name)
        return piece(name)


def pieces_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "used")


def test_a_piece_is_fetched_once_and_then_mapped(tmp_path: Path) -> None:
    store, names = Store(), ["3", "1", "2"]
    for _ in range(2):
        found = Cache(str(tmp_path / "cache"), 10**9).get(names, store)
        assert [data.tobytes() for data in found] == [piece(name) for name in names]
        assert all(isinstance(data, np.memmap) for data in found)
    assert store.asked == names
    assert pieces_of(tmp_path / "cache") == ["1", "2", "3"]


def _compete(folder: str, number: int, barrier: Any, results: Any) -> None:
    store = Store()
    names = [str(name) for name in np.random.default_rng(number).permutation(40)]
    barrier.wait()
    for begin in range(0, 40, 8):
        found = Cache(folder, 10**9).get(names[begin : begin + 8], store)
        assert [data.tobytes() for data in found] == [piece(name) for name in names[begin : begin + 8]]
    results.put(store.asked)


def test_processes_that_want_the_same_pieces_fetch_each_once(tmp_path: Path) -> None:
    context = mp.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_compete, args=(str(tmp_path), n, barrier, results)) for n in range(4)]
    for process in processes:
        process.start()
    asked = [name for _ in processes for name in results.get(timeout=60)]
    for process in processes:
        process.join(60)
    assert sorted(asked, key=int) == [str(name) for name in range(40)]
    assert len(pieces_of(tmp_path)) == 40


def test_who_is_killed_while_fetching_holds_up_nobody(tmp_path: Path) -> None:
    script = f"""
        import os, time
        from springtide.store import Cache
        def fetch(name):
            os.write(1, b"fetching\\n")
            time.sleep(600)
        Cache({str(tmp_path)!r}, 10**9).get(["1", "2"], fetch)
    """
    victim = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    assert victim.stdout.readline() == victim.stdout.readline() == b"fetching\n"
    assert pieces_of(tmp_path) == ["1.part", "2.part"]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    store = Store()
    assert Cache(str(tmp_path), 10**9).get(["2"], store)[0].tobytes() == piece("2")
    assert store.asked == ["2"]
    # what nobody wants again goes with the next eviction
    assert "1.part" in pieces_of(tmp_path)
    Cache(str(tmp_path), 2 * SIZE).get(["3", "4"], store)
    assert not [name for name in pieces_of(tmp_path) if name.endswith(".part")]


def test_who_gives_up_leaves_the_pieces_to_those_who_wait(tmp_path: Path) -> None:
    """Two wait for both pieces, in opposite orders; neither may wait for the other."""
    holds, waiting, store = threading.Event(), threading.Semaphore(0), Store()

    def fail(name: str) -> bytes:
        holds.set()
        waiting.acquire()
        raise ConnectionError("the store is gone")

    class Waits(Cache):
        def _own(self, name: str, wait: bool) -> Any:
            if wait:
                waiting.release()
            return super()._own(name, wait)

    def give_up() -> None:
        with pytest.raises(ConnectionError):
            Cache(str(tmp_path), 10**9).get(["1", "2"], fail)

    found: list[bytes] = []

    def wait(*names: str) -> None:
        assert holds.wait(60)
        found.extend(data.tobytes() for data in Waits(str(tmp_path), 10**9).get(names, store))

    threads = [threading.Thread(target=give_up, daemon=True)]
    threads += [threading.Thread(target=wait, args=names, daemon=True) for names in (("1", "2"), ("2", "1"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(found) == sorted([piece("1"), piece("2")] * 2)
    assert sorted(store.asked) == ["1", "2"]
    assert pieces_of(tmp_path) == ["1", "2"]


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True), max_size=20))
def test_the_limit_holds_whatever_is_asked_for(tmp_path_factory: pytest.TempPathFactory, gets: list[list[int]]) -> None:
    folder = tmp_path_factory.mktemp("cache")
    for names in gets:
        found = Cache(str(folder), 5 * SIZE).get([str(name) for name in names], Store())
        assert [data.tobytes() for data in found] == [piece(str(name)) for name in names]
        kept = set(map(int, pieces_of(folder)))
        assert len(kept) <= 5
        assert kept & set(names)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 5 * SIZE)
    for used, name in enumerate("123451"):
        cache.get([name], Store())
        os.utime(tmp_path / name, ns=(used, used))  # the clock of a file system is coarse
    cache.get(["6"], Store())
    assert pieces_of(tmp_path) == ["1", "4", "5", "6"]
    again = Store()
    cache.get(["4"], again)
    assert (tmp_path / "4").stat().st_mtime_ns > 10
    assert not again.asked


def test_a_bad_piece_is_dropped_and_fetched_again(tmp_path: Path) -> None:
    cache, store = Cache(str(tmp_path), 10**9), Store()
    cache.get(["1"], store)
    cache.drop("1")
    assert cache.get(["1"], store)[0].tobytes() == piece("1")
    assert store.asked == ["1", "1"]


def test_a_full_disk_is_named_once_and_stops_nothing(tmp_path: Path, small_disk: SmallDisk) -> None:
    script = f"""
        import logging
        logging.basicConfig()
        from springtide.store import Cache
        cache = Cache({str(tmp_path / "disk" / "cache")!r}, 10**9)
        def fetch(name):
            return bytes([int(name)]) * 60_000
        for _ in range(2):
            for name in range(20):
                assert cache.get([str(name)], fetch)[0].tobytes() == bytes([name]) * 60_000
        import os
        kept = [name for name in os.listdir(cache.folder) if name != "used"]
        assert 0 < len(kept) < 9 and all(os.path.getsize(f"{{cache.folder}}/{{name}}") == 60_000 for name in kept), kept
    """
    done = small_disk(tmp_path / "disk", [sys.executable, "-c", textwrap.dedent(script)])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("cannot keep what is read ([Errno 28] No space left on device)") == 1
    assert "set feed.cache to another disk" in done.stderr


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        found = Cache(str(tmp_path / "file"), 10**9).get(["1", "2"], Store())
    assert [data.tobytes() for data in found] == [piece("1"), piece("2")]
    assert "Not a directory" in caplog.text or "File exists" in caplog.text
