"""Rows from a real object store, through the node's cache: the same rows, read once, and never a wrong one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from springtide.config import Config
from springtide.dataset import open_dataset
from springtide.errors import CorruptShard
from springtide.shards import MANIFEST, TRAIN, Manifest, SplitReader, check_shard
from springtide.storage import Cache, Folder


@pytest.fixture
def remote(tiny: Config, s3: str, tmp_path: Path) -> Folder:
    """The tiny dataset on a real S3 server."""
    there = Folder(f"{s3}/{tmp_path.name}")
    there.fs.put(f"{Folder(tiny.shards.dataset).path}/", f"{there.path}/", recursive=True)
    return there


def all_rows(dataset: Folder, manifest: Manifest, cache: Cache | None = None) -> np.ndarray:
    rows = np.random.default_rng(0).permutation(manifest.splits[TRAIN].rows)
    found = SplitReader(dataset, manifest, TRAIN, cache).read(rows)
    assert np.array_equal(found.sample_ids, rows)
    return found.tokens


@pytest.mark.parametrize("cached", [True, False])
def test_rows_from_object_storage_are_those_of_the_disk(
    tiny: Config, remote: Folder, tmp_path: Path, cached: bool
) -> None:
    manifest, _ = open_dataset(remote.url)
    cache = Cache(str(tmp_path / "cache"), 10**9) if cached else None
    assert np.array_equal(all_rows(remote, manifest, cache), all_rows(Folder(tiny.shards.dataset), manifest))


def test_what_the_node_has_is_not_read_again(remote: Folder, tmp_path: Path) -> None:
    manifest, _ = open_dataset(remote.url)
    cache = Cache(str(tmp_path / "cache"), 10**9)
    before = all_rows(remote, manifest, cache)
    remote.remove()
    assert np.array_equal(all_rows(remote, manifest, cache), before)


@pytest.mark.parametrize("how", ["flip", "cut", "empty"])
def test_a_piece_that_rotted_on_the_node_is_read_again(remote: Folder, tmp_path: Path, how: str) -> None:
    manifest, _ = open_dataset(remote.url)
    cache = Cache(str(tmp_path / "cache"), 10**9)
    before = all_rows(remote, manifest, cache)
    pieces = [path for path in Path(cache.folder).iterdir() if path.name != "used"]
    for path in pieces:
        data = bytearray(path.read_bytes())
        if how == "flip":
            data[-1] ^= 1
        path.write_bytes({"flip": data, "cut": data[:100], "empty": b""}[how])
    assert np.array_equal(all_rows(remote, manifest, cache), before)
    assert np.array_equal(all_rows(remote, manifest, cache), before)


def test_a_dataset_with_foreign_digests_keeps_its_rows(remote: Folder, tmp_path: Path) -> None:
    """A dataset that claims the digests of another cannot change its rows.

    They share the node's cache, and the hostile one is opened first."""
    manifest, _ = open_dataset(remote.url)
    shard, other = manifest.splits[TRAIN].shards[0], Folder(f"{remote.url}-hostile")
    remote.fs.copy(f"{remote.path}/", f"{other.path}/", recursive=True)
    data = bytearray(other.read(shard.name))
    data[shard.groups[0].tokens] ^= 1
    other.write(shard.name, bytes(data))
    cache = Cache(str(tmp_path / "cache"), 10**9)
    with pytest.raises(CorruptShard, match="hostile"):
        all_rows(other, open_dataset(other.url)[0], cache)
    assert np.array_equal(all_rows(remote, manifest, cache), all_rows(remote, manifest))


@pytest.mark.parametrize("how", ["gone", "cut", "flip"])
def test_a_shard_that_is_bad_in_the_store_is_named(remote: Folder, tmp_path: Path, how: str) -> None:
    manifest, _ = open_dataset(remote.url)
    shard = manifest.splits[TRAIN].shards[0]
    data = bytearray(remote.read(shard.name))
    if how == "gone":
        remote.remove(shard.name)
    else:
        data[shard.groups[0].tokens] ^= 1
        remote.write(shard.name, bytes(data[: len(data) // 4] if how == "cut" else data))
    cache = Cache(str(tmp_path / "cache"), 10**9)
    for kept in (cache, cache, None):
        with pytest.raises(CorruptShard, match=rf"{shard.name}: .*{shard.digest}"):
            all_rows(remote, manifest, kept)


def test_a_manifest_that_names_a_missing_file(tiny: Config, tmp_path: Path) -> None:
    manifest, _ = open_dataset(tiny.shards.dataset)
    shard = manifest.splits[TRAIN].shards[0]
    empty = Folder(tmp_path / "empty")
    empty.write(MANIFEST, Folder(tiny.shards.dataset).read(MANIFEST))
    with pytest.raises(CorruptShard, match=rf"{shard.name}: row group \d+: .*No such file"):
        all_rows(empty, manifest)
    with pytest.raises(CorruptShard, match=f"{shard.name}: .*read"):
        check_shard(empty, shard)


def test_a_shard_of_any_size_is_not_read_to_its_end(tiny: Config, tmp_path: Path) -> None:
    manifest, _ = open_dataset(tiny.shards.dataset)
    shard = manifest.splits[TRAIN].shards[0]
    (tmp_path / MANIFEST).write_bytes(Folder(tiny.shards.dataset).read(MANIFEST))
    with (tmp_path / shard.name).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CorruptShard, match=f"{2**40} bytes .*{shard.size_bytes}"):
        check_shard(Folder(tmp_path), shard)
    with pytest.raises(CorruptShard, match=rf"{shard.name}: row group 0: .*{2**40} bytes"):
        SplitReader(Folder(tmp_path), manifest, TRAIN).read(np.arange(1))


def test_a_shard_that_is_no_file_is_not_waited_for(tiny: Config, tmp_path: Path) -> None:
    manifest, _ = open_dataset(tiny.shards.dataset)
    shard = manifest.splits[TRAIN].shards[0]
    (tmp_path / MANIFEST).write_bytes(Folder(tiny.shards.dataset).read(MANIFEST))
    os.mkfifo(tmp_path / shard.name)
    with pytest.raises(CorruptShard, match="regular file"):
        all_rows(Folder(tmp_path), manifest)


def test_a_store_that_is_down_is_no_corruption(tiny: Config, remote: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may work later is raised as it came, so that the run's own retries see it."""
    import fsspec

    manifest, _ = open_dataset(tiny.shards.dataset)
    down = {
        "endpoint_url": "http://127.0.0.1:9",
        "key": "k",
        "secret": "s",
        "config_kwargs": {"retries": {"max_attempts": 1}},
    }
    gone = Folder("s3://checkpoints/nowhere", **down)
    monkeypatch.setattr(type(gone.fs), "retries", 1)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9") as raised:
        all_rows(gone, manifest)
    assert not isinstance(raised.value, CorruptShard)

    def reset(*_: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(Folder, "read_range", reset)
    with pytest.raises(ConnectionResetError):
        all_rows(remote, manifest)
    fsspec.filesystem("s3").clear_instance_cache()


def test_a_group_is_bounded(tiny: Config) -> None:
    with pytest.raises(ValueError, match=r"shards\.rows_per_group = 50000: .*20000"):
        tiny.override({"shards.rows_per_group": 50_000})
