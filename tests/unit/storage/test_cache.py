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

from springtide.storage import Cache

SIZE = 10_000
SmallDisk = Callable[[Path, list[str]], "subprocess.CompletedProcess[str]"]


def piece(name: str) -> bytes:
    """What the store has under ``name``."""
    return np.random.default_rng(int(name, 16)).bytes(SIZE)


def names(*numbers: int) -> list[str]:
    """Of pieces."""
    return [f"{number:032x}" for number in numbers]


def own(folder: Path) -> Path:
    """Where a cache in ``folder`` keeps its pieces."""
    return Path(Cache(str(folder), 0).folder)


class Store:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, name: str) -> bytes:
        self.asked.append(name)
        return piece(name)


def pieces_of(folder: Path) -> list[str]:
    """Numbers of the pieces that a cache in ``folder`` has, in hex; those being fetched end in ``.part``."""
    return sorted(path.name.lstrip("0") for path in own(folder).iterdir() if path.name != "used")


def test_a_piece_is_fetched_once_and_then_mapped(tmp_path: Path) -> None:
    store, wanted = Store(), names(3, 1, 2)
    for _ in range(2):
        found = Cache(str(tmp_path / "cache"), 10**9).get(wanted, store)
        assert [data.tobytes() for data in found] == [piece(name) for name in wanted]
        assert all(isinstance(data, np.memmap) for data in found)
    assert store.asked == wanted
    assert pieces_of(tmp_path / "cache") == ["1", "2", "3"]


def _compete(folder: str, number: int, barrier: Any, results: Any) -> None:
    store = Store()
    wanted = names(*np.random.default_rng(number).permutation(40))
    barrier.wait()
    for begin in range(0, 40, 8):
        found = Cache(folder, 10**9).get(wanted[begin : begin + 8], store)
        assert [data.tobytes() for data in found] == [piece(name) for name in wanted[begin : begin + 8]]
    results.put(store.asked)


@pytest.mark.processes
def test_processes_that_want_the_same_pieces_fetch_each_once(tmp_path: Path) -> None:
    context = mp.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_compete, args=(str(tmp_path), n, barrier, results)) for n in range(4)]
    for process in processes:
        process.start()
    asked = [name for _ in processes for name in results.get(timeout=60)]
    for process in processes:
        process.join(60)
    assert sorted(asked) == names(*range(40))
    assert len(pieces_of(tmp_path)) == 40


@pytest.mark.processes
def test_who_is_killed_while_fetching_holds_up_nobody(tmp_path: Path) -> None:
    script = f"""
        import os, time
        from springtide.storage import Cache
        def fetch(name):
            os.write(1, b"fetching\\n")
            time.sleep(600)
        Cache({str(tmp_path)!r}, 10**9).get({names(1, 2)!r}, fetch)
    """
    store = Store()
    Cache(str(tmp_path), 10**9).get(names(9), store)
    victim = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    assert victim.stdout.readline() == victim.stdout.readline() == b"fetching\n"
    assert pieces_of(tmp_path) == ["1.part", "2.part", "9"]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    assert Cache(str(tmp_path), 10**9).get(names(2), store)[0].tobytes() == piece("2")
    assert store.asked == names(9, 2)
    # what nobody wants again goes with the next eviction
    assert "1.part" in pieces_of(tmp_path)
    Cache(str(tmp_path), 2 * SIZE).get(names(3, 4), store)
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
            Cache(str(tmp_path), 10**9).get(names(1, 2), fail)

    found: list[bytes] = []

    def wait(*numbers: int) -> None:
        assert holds.wait(60)
        found.extend(data.tobytes() for data in Waits(str(tmp_path), 10**9).get(names(*numbers), store))

    threads = [threading.Thread(target=give_up, daemon=True)]
    threads += [threading.Thread(target=wait, args=numbers, daemon=True) for numbers in ((1, 2), (2, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(found) == sorted([piece("1"), piece("2")] * 2)
    assert sorted(store.asked) == names(1, 2)
    assert pieces_of(tmp_path) == ["1", "2"]


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True), max_size=20))
def test_the_limit_holds_whatever_is_asked_for(tmp_path_factory: pytest.TempPathFactory, gets: list[list[int]]) -> None:
    folder = tmp_path_factory.mktemp("cache")
    for wanted in gets:
        found = Cache(str(folder), 5 * SIZE).get(names(*wanted), Store())
        assert [data.tobytes() for data in found] == [piece(name) for name in names(*wanted)]
        kept = {int(name or "0", 16) for name in pieces_of(folder)}
        assert len(kept) <= 5
        assert kept & set(wanted)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 5 * SIZE)
    for used, name in enumerate(names(1, 2, 3, 4, 5, 1)):
        cache.get([name], Store())
        os.utime(own(tmp_path) / name, ns=(used, used))  # the clock of a file system is coarse
    cache.get(names(6), Store())
    assert pieces_of(tmp_path) == ["1", "4", "5", "6"]
    again = Store()
    cache.get(names(4), again)
    assert (own(tmp_path) / names(4)[0]).stat().st_mtime_ns > 10
    assert not again.asked


def test_a_bad_piece_is_dropped_and_fetched_again(tmp_path: Path) -> None:
    cache, store = Cache(str(tmp_path), 10**9), Store()
    cache.get(names(1), store)
    cache.drop(*names(1))
    assert cache.get(names(1), store)[0].tobytes() == piece("1")
    assert store.asked == names(1, 1)


@pytest.mark.processes
def test_a_full_disk_is_named_once_and_stops_nothing(tmp_path: Path, small_disk: SmallDisk) -> None:
    script = f"""
        import logging
        logging.basicConfig()
        from springtide.storage import Cache
        cache = Cache({str(tmp_path / "disk" / "cache")!r}, 10**9)
        def fetch(name):
            return bytes([int(name, 16)]) * 60_000
        for _ in range(2):
            for name in range(20):
                assert cache.get([f"{{name:032x}}"], fetch)[0].tobytes() == bytes([name]) * 60_000
        import os
        kept = [name for name in os.listdir(cache.folder) if name != "used"]
        assert 0 < len(kept) < 9 and all(os.path.getsize(f"{{cache.folder}}/{{name}}") == 60_000 for name in kept), kept
    """
    done = small_disk(tmp_path / "disk", [sys.executable, "-c", textwrap.dedent(script)])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("cannot keep what is read ([Errno 28] No space left on device)") == 1
    assert "feed.cache" in done.stderr


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        found = Cache(str(tmp_path / "file"), 10**9).get(names(1, 2), Store())
    assert [data.tobytes() for data in found] == [piece("1"), piece("2")]
    assert "Not a directory" in caplog.text or "File exists" in caplog.text


@pytest.mark.parametrize(
    "name", ["", "1", "used", "../" + "0" * 32, "/" + "0" * 32, "0" * 32 + "\n", "0" * 32 + ".part", "F" * 32, "0" * 33]
)
def test_a_name_that_is_none_reaches_no_file(tmp_path: Path, name: str) -> None:
    cache, store = Cache(str(tmp_path / "cache"), 10**9), Store()
    for use in (lambda: cache.get([*names(1), name], store), lambda: cache.drop(name)):
        with pytest.raises(ValueError, match="piece"):
            use()
    assert not store.asked
    assert not list(tmp_path.iterdir())


def test_what_the_cache_did_not_write_is_never_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(str(tmp_path), 2 * SIZE)
    cache.get(names(9), Store())
    theirs = [tmp_path, own(tmp_path)]
    for folder in theirs:
        for name in ("thesis.docx", "movie.mp4.part", "a" * 31):
            (folder / name).write_bytes(b"mine" * SIZE)
            os.utime(folder / name, ns=(1, 1))
        (folder / "old").mkdir()
    (own(tmp_path) / ("b" * 32)).mkdir()
    (own(tmp_path) / ("c" * 32)).symlink_to(tmp_path / "thesis.docx")
    for number in range(1, 8):
        cache.get(names(number), Store())
    for folder in theirs:
        assert {path.name for path in folder.iterdir()} >= {"thesis.docx", "movie.mp4.part", "a" * 31, "old"}
        assert (folder / "thesis.docx").read_bytes() == (folder / "movie.mp4.part").read_bytes() == b"mine" * SIZE
    kept = [name for name in names(*range(1, 10)) if (own(tmp_path) / name).exists()]
    assert kept in (names(6, 7), names(7))
    # a link of a piece's name is not followed
    assert cache.get(["c" * 32], Store())[0].tobytes() == piece("c" * 32)
    assert (tmp_path / "thesis.docx").read_bytes() == b"mine" * SIZE
    assert not caplog.text


@pytest.mark.parametrize("content", ["", "no number", "-1000000", "1e3", "9" * 400, "\xff"])
def test_a_count_that_is_odd_is_made_again(tmp_path: Path, content: str) -> None:
    cache = Cache(str(tmp_path), 3 * SIZE)
    cache.get(names(1, 2), Store())
    (own(tmp_path) / "used").write_bytes(content.encode("latin-1"))
    cache.get(names(3), Store())
    assert (own(tmp_path) / "used").read_text() == str(3 * SIZE)
    cache.get(names(4), Store())
    assert len(pieces_of(tmp_path)) == 2


@pytest.mark.parametrize("how", ["of others", "a link", "a file", "open to all"])
def test_a_folder_that_others_could_have_filled_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    cache, elsewhere = Cache(str(tmp_path), 10**9), tmp_path / "elsewhere"
    elsewhere.mkdir()
    planted = elsewhere if how == "a link" else own(tmp_path)
    if how == "a link":
        own(tmp_path).symlink_to(elsewhere)
    elif how == "a file":
        own(tmp_path).touch()
    else:
        own(tmp_path).mkdir()
        own(tmp_path).chmod(0o777 if how == "open to all" else 0o755)
    if planted.is_dir():
        (planted / names(1)[0]).write_bytes(b"planted")
        (planted / f"{names(2)[0]}.part").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_bytes(b"untouched")
    if how == "of others":
        if os.getuid():
            pytest.skip("only root can give a folder away")
        os.chown(planted, 65534, 65534)
    with caplog.at_level(logging.WARNING):
        found = cache.get(names(1, 2), Store())
    assert [data.tobytes() for data in found] == [piece("1"), piece("2")]
    assert (tmp_path / "victim").read_bytes() == b"untouched"
    assert "only this user" in caplog.text


def test_a_new_folder_is_closed_to_others(tmp_path: Path) -> None:
    Cache(str(tmp_path), 10**9).get(names(1), Store())
    assert own(tmp_path).stat().st_mode & 0o777 == 0o700
