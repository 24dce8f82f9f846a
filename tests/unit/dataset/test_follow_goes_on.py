"""Batches of which nothing can be sealed, and stores that are away for a while: the files after them are taken all the same."""

from __future__ import annotations

import contextlib
import errno
import gzip
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from following import arrive, config_of

import springtide.app.follow as following_app
from springtide.app.follow import follow
from springtide.app.prepare import CARD
from springtide.config import Config
from springtide.dataset import UnfitBatch, in_process, is_transient, new_files, seal
from springtide.errors import ConfigError, CorpusError
from springtide.shards import INDEX, IndexEntry, read_index
from springtide.store import Folder

PROGRAM = Path(__file__).parents[2] / "programs" / "following.py"


def once(config: Config) -> list[IndexEntry]:
    return list(follow(config, once=True, at_least_bytes=1, wait=lambda _: None))


class Enough(Exception):
    """Ends a call that goes on for ever."""


def looked(config: Config, *between: Callable[[], object]) -> list[IndexEntry]:
    """Follow for ever; after each look do what is given for it, and end after the last."""
    rest, found = iter(between), list[IndexEntry]()

    def wait(_: float) -> None:
        try:
            next(rest)()
        except StopIteration:
            raise Enough from None

    with contextlib.suppress(Enough):
        for entry in follow(config, at_least_bytes=1, wait=wait):
            found.append(entry)
    return found


def nothing() -> None:
    """Only look again."""


def taken(config: Config) -> list[list[str]]:
    return [sorted(entry.files) for entry in read_index(Folder(config.shards.root))]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "text").mkdir()
    return config_of(tmp_path / "text", tmp_path / "sets")


def poor(config: Config, name: str) -> str:
    Path(config.corpus.source, name).write_text("x")
    return name


def names_below(config: Config) -> list[str]:
    """The names below the root: datasets, and the index."""
    return sorted(os.listdir(config.shards.root))


def test_a_batch_of_which_nothing_is_left_waits_for_others(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    names = [poor(config, f"poor-{number}.txt") for number in range(9)]
    more: list[str] = []
    source = Path(config.corpus.source)
    looked(config, nothing, nothing, nothing, lambda: more.extend(arrive(source, "more", 0)), nothing, nothing)
    assert taken(config) == [sorted([*names, *more])]
    [told] = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "not one row" in told
    assert "poor-0.txt" in told
    assert "poor-8.txt" not in told, "a few names"
    assert names_below(config) == sorted(["index", read_index(Folder(config.shards.root))[0].dataset])


def test_a_damaged_file_does_not_hold_up_those_after_it(config: Config) -> None:
    source = Path(config.corpus.source)
    (source / "cut.txt.gz").write_bytes(gzip.compress(os.urandom(9000))[:5000])
    more: list[list[str]] = []

    def mend() -> None:
        (source / "cut.txt.gz").write_bytes(gzip.compress(b"mended text\n" * 900))
        more.append(sorted(["cut.txt.gz", *arrive(source, "fourth", 3)]))

    looked(
        config,
        *(nothing, nothing, lambda: more.append(arrive(source, "second", 1)), nothing, nothing),
        *(lambda: more.append(arrive(source, "third", 2)), nothing, nothing, mend, nothing, nothing),
    )
    assert taken(config) == more


def test_a_batch_waits_for_room_on_the_disk(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    files, real, full = arrive(Path(config.corpus.source), "first", 0), shutil.disk_usage, [True]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=0) if full[0] else real(path))
    looked(config, *[nothing] * 3, lambda: full.__setitem__(0, False), nothing)
    assert taken(config) == [files]


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_single_call_tells_the_error_and_the_next_takes_all(config: Config, is_planned: bool) -> None:
    """``is_planned``: an earlier version kept the plan of such a batch, and tried it for ever."""
    name = poor(config, "poor.txt")
    if is_planned:
        Folder(f"{config.shards.root}/{INDEX}").write_json("plan.json", new_files(config.corpus, []))
    for _ in range(2):
        with pytest.raises(CorpusError, match="not one row"):
            once(config)
        assert names_below(config) == ["index"]
        assert not os.listdir(Path(config.shards.root, INDEX))
    more = arrive(Path(config.corpus.source), "more", 0)
    once(config)
    assert taken(config) == [sorted([name, *more])]


@pytest.mark.parametrize("place", ["planned", "refused", "unmade"])
def test_a_call_that_is_killed_while_it_refuses_a_batch_loses_no_file(place: str, config: Config) -> None:
    name = poor(config, "poor.txt")
    command = [sys.executable, str(PROGRAM), config.corpus.source, config.shards.root, place]
    path = os.pathsep.join([str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == -signal.SIGKILL
    more = arrive(Path(config.corpus.source), "more", 0)
    once(config)
    assert taken(config) == [sorted([name, *more])]
    assert len(names_below(config)) == 2


def test_a_store_that_is_away_is_asked_again(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files, real, away = arrive(Path(config.corpus.source), "first", 0), following_app.new_files, [True]

    def flaky(*given: object) -> dict[str, str]:
        if away[0]:
            raise OSError("503 Slow Down")
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(following_app, "new_files", flaky)
    with pytest.raises(OSError, match="503"):
        once(config)
    looked(config, *[nothing] * 3, lambda: away.__setitem__(0, False), *[nothing] * 2)
    assert taken(config) == [files]
    assert len([one for one in caplog.records if "503 Slow Down" in one.getMessage()]) == 1, "once an outage"


@pytest.mark.parametrize("place", ["make_dataset", "append_entry", "new_files"])
def test_a_store_that_is_away_in_a_batch_keeps_its_plan(
    config: Config, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    files = arrive(Path(config.corpus.source), "first", 0)
    module = sys.modules["springtide.dataset.follow"]
    real, left = getattr(module, place), [2]

    def flaky(*given: object) -> object:
        left[0] -= 1
        if left[0] >= 0:
            raise CorpusError("cannot be reached") from ConnectionResetError("reset by peer")
        return real(*given)

    monkeypatch.setattr(module, place, flaky)
    looked(config, *[nothing] * 6)
    assert taken(config) == [files]


def test_a_card_that_cannot_be_written_is_written_later(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    arrive(Path(config.corpus.source), "first", 0)
    real, left = following_app.write_card, [2]

    def flaky(url: str) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionResetError
        real(url)

    monkeypatch.setattr(following_app, "write_card", flaky)
    entries = looked(config, *[nothing] * 6)
    assert entries == read_index(Folder(config.shards.root))
    assert (Path(config.shards.root) / entries[0].dataset / CARD).exists()


def test_a_file_that_is_gone_before_it_is_read_is_none_of_the_batch(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = arrive(Path(config.corpus.source), "first", 0)
    module = sys.modules["springtide.dataset.follow"]
    real = module.make_dataset

    def gone(*given: object) -> object:
        if Path(config.corpus.source, files[0]).exists():
            os.unlink(Path(config.corpus.source, files[0]))
            raise FileNotFoundError(files[0])
        return real(*given)

    monkeypatch.setattr(module, "make_dataset", gone)
    looked(config, *[nothing] * 4)
    assert taken(config) == [files[1:]]
    assert len(names_below(config)) == 2


def test_errors_that_do_not_pass_end_it(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> dict[str, str]:
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(following_app, "new_files", denied)
    with pytest.raises(PermissionError):
        looked(config, nothing)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_which_errors_pass() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    for error, is_passing in (
        (OSError("503 Slow Down"), True),
        (TimeoutError(), True),
        (PermissionError("403"), False),
        (ConfigError("wrong"), False),
        (CorpusError("has no text left"), False),
        (caused(CorpusError("cannot be reached"), ConnectionResetError()), True),
        (caused(CorpusError("cannot be reached"), PermissionError()), False),
        (caused(CorpusError("the disk is full"), full), True),
        (caused(CorpusError("cannot be read"), OSError("Truncated compressed stream")), False),
        (caused(CorpusError("cannot be read"), caused(OSError("503 Slow Down"), RuntimeError())), True),
    ):
        assert is_transient(error) == is_passing, error


def test_what_seals_nothing_names_its_files(config: Config) -> None:
    poor(config, "poor.txt")
    files = new_files(config.corpus, [])
    with pytest.raises(UnfitBatch) as raised:
        seal(config.corpus, config.shards, files, lambda *_: None, in_process)
    assert raised.value.files == files
