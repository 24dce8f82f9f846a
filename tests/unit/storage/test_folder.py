"""A name that can be seen is complete."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from springtide.errors import ConfigError, DamagedFile
from springtide.storage import Folder


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(tmp_path / "a" / "b" if request.param == "local" else f"memory://test-{uuid.uuid4().hex}/b")


def test_what_is_written_is_read_listed_and_removed(folder: Folder) -> None:
    assert folder.names() == []
    folder.write("x/one.bin", b"1" * 1000)
    folder.write_json("two.json", {"a": [1, 2]})
    assert folder.names() == ["two.json", "x"]
    assert folder.files() == ["two.json", "x/one.bin"]
    assert (folder / "y").files() == []
    assert (folder / "x").read("one.bin") == b"1" * 1000
    assert folder.size("x/one.bin") == 1000
    assert folder.read_json("two.json") == {"a": [1, 2]}
    folder.remove("x")
    folder.remove("x")
    assert folder.names() == ["two.json"]
    assert not folder.exists("x/one.bin")
    folder.remove()
    assert not folder.exists()


@pytest.mark.processes
@pytest.mark.parametrize("dies_in", ["fsync", "replace"])
def test_a_writer_killed_before_the_rename_leaves_the_old_bytes(tmp_path: Path, dies_in: str) -> None:
    folder = Folder(tmp_path)
    folder.write("name", b"old")
    script = (
        "import sys, os, signal; from springtide.storage import Folder\n"
        f"os.{dies_in} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Folder(sys.argv[1]).write('name', b'x' * 10**6)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert folder.names() == ["name"]
    assert folder.read("name") == b"old"


def test_a_full_disk_leaves_the_old_bytes_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    folder.write("name", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write("name", b"new")
    assert folder.read("name") == b"old"
    assert os.listdir(tmp_path) == ["name"]


@pytest.mark.parametrize(
    "url",
    [
        "nosuch://bucket/x",
        "reference://::file:///tmp/templates.json",  # fsspec 2024.6 runs the templates in it
        "simplecache::s3://bucket/x",
        "github://user:repository@/x",
        "ssh://host/x",
        "http://169.254.169.254/latest",
        "data:,text",  # fsspec needs no slashes for this one
        "data:text/plain;base64,dGV4dA==",
    ],
)
def test_what_is_no_plain_url_of_a_known_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"URL = .*(chain|opened)"):
        Folder(url)


@pytest.mark.parametrize("name", ["a:b", "data", "date:,x"])
def test_a_colon_in_a_path_is_no_protocol(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Folder(name).write("x", b"1")
    assert (tmp_path / name / "x").read_bytes() == b"1"


def test_a_corpus_may_be_read_over_http() -> None:
    assert (Folder("https://host/texts", is_source=True) / "more").url == "https://host/texts/more"
    with pytest.raises(ConfigError, match=r"URL = .*protocol.*https"):
        Folder("https://host/texts")


def test_a_folder_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Folder(tmp_path / "file" / "below").write("name", b"")


def test_parts_are_written_one_after_the_other(folder: Folder) -> None:
    parts = [memoryview(bytes([number]) * size) for number, size in enumerate((5, 0, 20_000_000, 1))]
    folder.put("long", parts)
    assert folder.read("long") == b"".join(parts)
    assert bytes(folder.read_range("long", 3, 7)) == b"\0\0\2\2"
    for begin, end in ((3, 20_000_004), (0, 1), (20_000_000, 30_000_000)):
        assert b"".join(folder.stream("long", begin, end)) == folder.read("long")[begin:end]
    folder.put("long", [memoryview(b"short")])
    assert folder.read("long") == b"short"


def test_of_many_who_create_a_name_one_succeeds(folder: Folder, tmp_path: Path) -> None:
    folder.create("name", b"first")
    with pytest.raises(FileExistsError):
        folder.create("name", b"second")
    assert folder.read("name") == b"first"
    assert folder.names() == ["name"]


@pytest.mark.parametrize("what", ["zeros", "pipe", "loop", "below a file"])
def test_what_is_no_regular_file_is_no_file(tmp_path: Path, what: str) -> None:
    folder, path, name = Folder(tmp_path), tmp_path / "it", "it"
    if what == "zeros":
        path.symlink_to("/dev/zero")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "loop":
        path.symlink_to(path)
    else:
        path.write_bytes(b"")
        name = "it/below"
    for read in (
        lambda: folder.read(name),
        lambda: folder.open(name),
        lambda: folder.read_range(name, 0, 1),
        lambda: list(folder.stream(name, 0, 1)),
        lambda: folder.local_file(name),
    ):
        with pytest.raises(FileNotFoundError, match="it"):
            read()


def test_a_file_larger_than_memory_is_refused_unread(tmp_path: Path) -> None:
    """A file that is larger than memory is refused before it is read."""
    with (tmp_path / "it.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DamagedFile, match=r"it\.json: .*268,435,456 bytes"):
        Folder(tmp_path).read_json("it.json")
    assert Folder(tmp_path).read_range("it.json", 2**40 - 2, 2**62) == bytes(2)
    assert Folder(tmp_path).read_range("it.json", 2**70, 2**71) == b""


def test_json_of_too_many_values_is_damaged(tmp_path: Path) -> None:
    """``{},`` takes 26 times its text once it is parsed: 200 MiB of it took 5 GiB."""
    (tmp_path / "it.json").write_bytes(b"[" + b"{}," * 2**23 + b"{}]")
    before_bytes = psutil.Process().memory_info().rss
    with pytest.raises(DamagedFile, match=r"it\.json: .*16,777,219 values.*16,777,216"):
        Folder(tmp_path).read_json("it.json")
    assert psutil.Process().memory_info().rss < before_bytes + 2**28


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 10_000], ids=lambda data: str(data[:5]))
def test_what_is_not_json_is_named(folder: Folder, data: bytes) -> None:
    folder.write("it.json", data)
    with pytest.raises(DamagedFile, match=r"it\.json: .*not JSON"):
        folder.read_json("it.json")


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_removing_many_files_ignores_missing_ones(tmp_path: Path, kind: str) -> None:
    """Many files are removed and nobody minds those that are not there."""
    folder = Folder(tmp_path / "some") if kind == "disk" else Folder(f"memory://{tmp_path.name}-some")
    for name in ("a/1", "a/2", "b"):
        folder.write(name, b"x")
    folder.remove_files(["a/1", "a/2", "never there"])
    assert folder.files() == ["b"]
    folder.remove_files(["a/1"])
    folder.remove_files([])
    assert folder.files() == ["b"]


def test_a_file_is_read_no_further_than_requested(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a store is read no further than is asked.

    A range of a large file is what one process reads of a source: fsspec would read 50 MiB behind it."""
    from springtide.storage import s3 as client

    folder, data = Folder(f"{s3}/ranges"), bytes(range(256)) * 16_384
    folder.write("four-mib", data)
    asked: list[tuple[int, int]] = []
    read_range = client.read_range

    def noted(fs: object, path: str, begin: int, end: int) -> memoryview:
        asked.append((begin, end))
        return read_range(fs, path, begin, end)

    monkeypatch.setattr(client, "read_range", noted)
    with folder.open("four-mib") as file:
        file.seek(10)
        assert [file.read(3), file.read(2**19)] == [data[10:13], data[13 : 13 + 2**19]]
        assert asked == [(10, 10 + 2**20)]
        assert file.seek(-5, 2) == len(data) - 5
        assert [file.read(), file.read()] == [data[-5:], b""]
        file.seek(0)
        assert file.read() == data
    with pytest.raises(FileNotFoundError):
        folder.open("none")


def test_an_empty_range_of_an_object_is_empty(s3: str) -> None:
    """As for a tensor without elements, whose piece is verified like any other."""
    folder = Folder(f"{s3}/{uuid.uuid4().hex}")
    folder.write("it", b"123")
    assert bytes(folder.read_range("it", 1, 1)) == b""
    assert bytes(folder.read_range("it", 1, 3)) == b"23"


def test_an_object_larger_than_memory_is_refused_unread(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that is larger than memory is refused before it is read."""
    folder = Folder(f"{s3}/large")
    folder.write("it.json", b"1" * 1000)
    assert len(folder.read("it.json")) == 1000
    monkeypatch.setattr("springtide.storage.folder._WHOLE_BYTES", 999)
    with pytest.raises(DamagedFile, match=r"it\.json: .*999 bytes"):
        folder.read_json("it.json")


def test_a_large_write_that_fails_leaves_the_old_bytes(s3: str) -> None:
    """A large write that fails half way leaves the old bytes where fsspec writes."""
    folder, mib = Folder(f"{s3}/halves"), memoryview(bytes(2**20))
    folder._is_s3 = False  # as in stores that have no client here: gs and az
    folder.write("new", b"old")

    def parts() -> Iterator[memoryview]:
        for number in range(40):
            if number == 35:  # two parts of the upload are there
                raise ValueError("source is gone")
            yield mib

    with pytest.raises(ValueError, match="source is gone"):
        folder.put_stream("new", parts(), 40 * 2**20)
    assert folder.read("new") == b"old"
    folder.put_stream("new", [mib] * 20, 20 * 2**20)
    assert folder.size("new") == 20 * 2**20


@pytest.mark.parametrize(
    "key",
    ["a.txt", "a b%20~[]{}.txt", "a\\b", "...", "a//b", "/a", "a/", "a/./b", "../a", "a/..", "a\x01b", "a\x7f", "a\n"],
)
def test_keys_that_the_client_cannot_ask_for_are_known(key: str) -> None:
    """A slash at the end or the beginning is lost: the client then asks for another object."""
    from obstore.store import MemoryStore

    from springtide.storage import s3 as client

    store, is_known = MemoryStore(), client.can_ask_for(f"bucket/{key}")
    try:
        store.put(key, b"")
        is_exact = store.list().collect()[0]["path"] == key
    except ValueError:
        is_exact = False
    assert is_known == is_exact


@pytest.mark.parametrize("longest", [400, 10**6])
def test_a_range_longer_than_one_read_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    """Linux reads at most 2 GiB in one call."""
    folder, data = Folder(tmp_path), bytes(range(256)) * 8
    folder.write("it", data)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, longest), at))
    monkeypatch.setattr(os, "preadv", lambda file, into, at: preadv(file, [into[0][:longest]], at))
    for begin, end in ((0, 2048), (3, 1500), (0, 10**15), (2000, 2100), (2048, 2050), (5, 5)):
        assert bytes(folder.read_range("it", begin, end)) == data[begin:end]


READS = {
    "read": lambda folder, name: folder.read(name),
    "open": lambda folder, name: folder.open(name).read(),
    "read_range": lambda folder, name: folder.read_range(name, 0, 9),
    "stream": lambda folder, name: list(folder.stream(name, 0, 9)),
    "size": lambda folder, name: folder.size(name),
    "local_file": lambda folder, name: folder.local_file(name),
}


@pytest.mark.parametrize("read", READS)
def test_a_confined_folder_follows_no_link_out_of_it(tmp_path: Path, read: str) -> None:
    inside, outside = tmp_path / "in", tmp_path / "in-the-way"  # a name that begins with the folder's
    (inside / "below").mkdir(parents=True)
    outside.mkdir()
    for place in (inside, outside):
        (place / "real").write_bytes(b"text")
    (inside / "good").symlink_to("real")
    (inside / "below" / "good").symlink_to("../real")
    (inside / "bad").symlink_to("../in-the-way/real")
    (inside / "folder").symlink_to(outside)
    (inside / "gone").symlink_to(outside / "gone")
    folder = Folder(inside).confined()
    for name in ("real", "good", "below/good"):
        READS[read](folder, name)
    for name in ("bad", "folder/real", "gone", "../in-the-way/real"):
        READS[read](Folder(inside), name) if name != "gone" else None
        with pytest.raises(ConfigError, match=rf"{name} = '.*in-the-way/.*': .*link"):
            READS[read](folder, name)
    with pytest.raises(ConfigError, match="outside"):
        READS[read](folder / "below", "good")
    with pytest.raises(FileNotFoundError):
        READS[read](folder, "absent")
    os.mkfifo(inside / "pipe")
    with pytest.raises(ConfigError, match=r"pipe = 'prw.*regular file"):
        READS[read](folder, "pipe")


def test_a_confined_folder_of_a_store_is_read_as_before() -> None:
    folder = Folder(f"memory://test-{uuid.uuid4().hex}/b")
    folder.write("x", b"1")
    assert folder.confined() == folder
    assert folder.confined().read("x") == b"1"
