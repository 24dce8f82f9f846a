"""The index of row groups: mapped and shared, refused where it contradicts the manifest, and datasets from before it open."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import SEALED

from springtide.config import Config
from springtide.config.data import WHOLE, DataConfig, FeedConfig, ShardsConfig, StreamConfig
from springtide.config.steps import OrderStep
from springtide.dataset import open_dataset
from springtide.errors import CorpusError
from springtide.shards import (
    HELDOUT,
    MANIFEST,
    ROW_GROUPS,
    TRAIN,
    Manifest,
    Split,
    SplitReader,
    load_manifest,
    write_manifest,
)
from springtide.shards.shard_table import Columns, ShardTable
from springtide.storage import Cache, Folder, digest
from springtide.stream import open_data

FORMAT_8 = Path(__file__).parent / "format_8"
"""A dataset that commit 6ed7b9d prepared, of rows of 16 tokens."""


def order_of(url: str) -> Any:
    stream = StreamConfig(global_batch=4, lanes=4, seed=1)
    return open_data(DataConfig(stream, ShardsConfig(dataset=url, sequence_length=16), FeedConfig())).order


def test_a_dataset_of_format_8_opens_and_gives_the_same_batches(tmp_path: Path) -> None:
    """Its digest, too, is the one that it was sealed with: runs that were trained on it resume."""
    manifest, _ = open_dataset(str(FORMAT_8))
    assert (manifest.format, manifest.digest) == (8, Folder(FORMAT_8).read_json(MANIFEST)["digest"])
    assert manifest.digest == "326d90aca0d2098a3affb09c1e2cad93"
    shutil.copytree(FORMAT_8, tmp_path / "new")
    write_manifest(Folder(tmp_path / "new"), manifest)
    new, _ = open_dataset(str(tmp_path / "new"))
    assert new.format == 9
    for name, split in manifest.splits.items():
        assert list(split.shards) == list(new.splits[name].shards)
        one, other = (
            SplitReader(Folder(url), found, name).read(np.arange(split.rows))
            for url, found in ((FORMAT_8, manifest), (tmp_path / "new", new))
        )
        assert all(map(np.array_equal, one, other))
    old_order, new_order = (order_of(str(url)) for url in (FORMAT_8, tmp_path / "new"))
    assert old_order.identity == "bdcd15ce9c9fc24dbdcba0a0dd2443da"
    batches = [old_order.batch(OrderStep(step)).tolist() for step in (0, 1, 50)]
    assert batches == [new_order.batch(OrderStep(step)).tolist() for step in (0, 1, 50)]
    assert batches[0] == [374, 231, 23, 40]


def test_what_is_sealed_is_found_in_the_index(tiny: Config) -> None:
    dataset = Folder(tiny.shards.dataset)
    manifest = load_manifest(dataset)
    assert manifest.row_groups is not None
    assert manifest.row_groups.digest == digest.of_bytes(dataset.read(ROW_GROUPS))
    for split in manifest.splits.values():
        table = split.shards
        assert ShardTable.of(list(table)) == table
        assert [group.rows for shard in table for group in shard.groups] == split.group_rows().tolist()
        places = [(number, at) for number, shard in enumerate(table) for at in range(len(shard.groups))]
        assert [table.shard_of(group) for group in range(table.num_groups)] == places
        assert [table[number].groups[at] for number, at in places] == list(map(table.group, range(table.num_groups)))
    assert table[-1] == table[len(table) - 1] == table[-1:][0]


def resealed(change: Callable[[dict[str, Any], bytearray], None], tiny: Config, to: Path) -> Folder:
    """The tiny dataset with another manifest and index, whose digests are right."""
    there, dataset = Folder(to), Folder(tiny.shards.dataset)
    record, data = dataset.read_json(MANIFEST), bytearray(dataset.read(ROW_GROUPS))
    record["row_groups"]["digest"] = ""
    change(record, data)
    if record["row_groups"] and not record["row_groups"]["digest"]:
        record["row_groups"]["digest"] = digest.of_bytes(bytes(data))
    there.write(ROW_GROUPS, bytes(data))
    there.write_json(MANIFEST, record)
    return there


def _number(place: int, value: int) -> Callable[[dict[str, Any], bytearray], None]:
    """Another number: the first is the number of the first shard."""

    def change(_: dict[str, Any], data: bytearray) -> None:
        begin = 32 + 8 * place if place >= 0 else len(data) + 8 * place
        data[begin : begin + 8] = value.to_bytes(8, "little", signed=True)

    return change


def _group_number(column: int, value: int) -> Callable[[dict[str, Any], bytearray], None]:
    """Another number of the first row group: 0 is its ``row_ends``, 1 to 4 its offsets."""

    def change(record: dict[str, Any], data: bytearray) -> None:
        splits = [split["shards"] for own in record["sources"].values() for split in own.values()]
        shards, groups = (sum(split[name] for split in splits) for name in ("files", "row_groups"))
        begin = 32 + 56 * shards + 8 * groups * column
        data[begin : begin + 8] = value.to_bytes(8, "little", signed=True)

    return change


def _count(name: str, value: Any) -> Callable[[dict[str, Any], bytearray], None]:
    return lambda record, _: record["sources"][WHOLE][TRAIN]["shards"].__setitem__(name, value)


def _longer(record: dict[str, Any], data: bytearray) -> None:
    data += bytes(56)


def _huge(record: dict[str, Any], data: bytearray) -> None:
    groups = record["sources"][WHOLE][TRAIN]["shards"]
    record["row_groups"]["size_bytes"] += 56 * 10**9
    groups["row_groups"] += 10**9


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda _, data: data.__delitem__(slice(-8, None)),
            r"row_groups\.bin: has \d+ bytes, manifest.json says row_groups",
        ),
        (_longer, r"row_groups\.bin: has \d+ bytes, manifest.json says row_groups.size_bytes = \d+"),
        (_huge, r"row_groups\.bin: has \d+ bytes, manifest.json says row_groups.size_bytes = 56\d+"),
        (_count("row_groups", 10**9), r"row_groups.size_bytes = \d+, \d+ shards and \d+ row groups take 56\d+"),
        (_count("row_groups", 10**18), "row_groups"),
        (_count("files", 0), "files"),
        (_count("files", -1), "files"),
        (_count("files", "many"), "files"),
        (lambda record, _: record["row_groups"].update(digest="0" * 32), "digest expected 0{32}, found"),
        (lambda record, _: record["row_groups"].update(digest="../victim"), "row_groups|digest"),
        (lambda record, _: record.update(row_groups=None), "valid"),
        (lambda record, _: record.update(sources=[]), "sources"),
        (lambda record, _: record["sources"].update(web={}), "sources|web"),
        (lambda record, _: record["sources"][WHOLE].update(train=3), "sources"),
        (lambda _, data: data.__setitem__(0, 0), r"row_groups\.bin: begins with b'\\x00pringtide"),
        (_number(0, -1), r"row_groups\.bin: number = -1 of a shard"),
        (_group_number(0, -5), "rows = -5"),
        (_group_number(0, 2**62), "row group that is not inside the file: row group 0: rows = "),
        (_group_number(1, -8), "sample_ids = -8"),
        (_group_number(1, 2**63 - 1), "sample_ids = 9223372036854775807"),
        (_group_number(2, 3), "num_bytes = 3"),
        (_group_number(3, 2**40), "tokens = 1099511627776"),
        (_group_number(4, 2**63 - 1), "end = 9223372036854775807"),
    ],
)
def test_an_index_that_says_what_cannot_be_is_refused(
    tiny: Config, tmp_path: Path, change: Callable[[dict[str, Any], bytearray], None], told: str
) -> None:
    with pytest.raises(CorpusError, match=told):
        load_manifest(resealed(change, tiny, tmp_path))


def test_a_number_that_changed_and_still_fits_is_found(tiny: Config, tmp_path: Path) -> None:
    """The digest of the manifest covers that of the index."""
    for path in (MANIFEST, ROW_GROUPS):
        (tmp_path / path).write_bytes(Folder(tiny.shards.dataset).read(path))
    data = bytearray((tmp_path / ROW_GROUPS).read_bytes())
    data[-1] ^= 1
    (tmp_path / ROW_GROUPS).write_bytes(data)
    with pytest.raises(CorpusError, match=r"row_groups\.bin: .*digest"):
        load_manifest(Folder(tmp_path))
    with pytest.raises(CorpusError, match=r"manifest .*digest"):
        load_manifest(resealed(lambda _, data: data.__setitem__(-1, data[-1] ^ 1), tiny, tmp_path))
    (tmp_path / ROW_GROUPS).unlink()
    with pytest.raises(CorpusError, match=r"row_groups\.bin: .*missing"):
        load_manifest(Folder(tmp_path))


def table_of(groups: int, rows: int = 64, row_bytes: int = 34) -> ShardTable:
    """A table of shards of 16 row groups."""
    shards = groups // 16
    begins = np.tile(np.arange(16, dtype=np.int64), shards) * (12 + row_bytes) * rows
    offsets = np.stack([begins, begins + 8 * rows, begins + 12 * rows, begins + (12 + row_bytes) * rows])
    random = np.random.default_rng(0)
    columns = Columns(
        size_bytes=np.full(shards, 16 * (12 + row_bytes) * rows, np.int64),
        digests=random.integers(1, 256, (shards, 16)).astype(np.uint8),
        signatures=np.zeros((shards, 16), np.uint8),
        group_ends=np.arange(1, shards + 1, dtype=np.int64) * 16,
        row_ends=np.arange(1, groups + 1, dtype=np.int64) * rows,
        offsets=offsets,
        group_digests=random.integers(1, 256, (groups, 16)).astype(np.uint8),
    )
    return ShardTable([f"train-{number:05d}.parquet" for number in range(shards)], columns)


def sealed_table(groups: int) -> Manifest:
    table = table_of(groups)
    counts = {"documents": 1, "tokens": 1, "num_bytes": 1, "rows": int(table.columns.row_ends[-1])}
    split = Split.model_validate({**counts, "shards": table})
    facts = {"sequence_length": 16, "token_type": "uint16", "vocab_size": 300, "sources": {WHOLE: {TRAIN: split}}}
    return Manifest.model_validate({**SEALED, **facts})


def test_a_process_holds_four_bytes_a_row_group(tmp_path: Path) -> None:
    groups, held = 160_000, []
    write_manifest(Folder(tmp_path), sealed_table(groups))
    assert (tmp_path / MANIFEST).stat().st_size < 2000
    for step in (lambda: load_manifest(Folder(tmp_path)), lambda: order_of(str(tmp_path))):
        tracemalloc.start()
        found = step()
        held.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert len(found.batch(OrderStep(0))) == 4
    assert held[0] < 25 * 2**20  # as many are checked at a time, however many there are
    assert held[1] < held[0] + 5 * groups + 2**20


def test_a_node_fetches_the_index_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, cache = Folder("memory://indexes"), Cache(str(tmp_path), 10**8)
    write_manifest(dataset, sealed_table(1600))
    fetched: list[str] = []
    read_range = Folder.read_range

    def noted(self: Folder, name: str, begin: int, end: int) -> bytes | memoryview:
        fetched.append(name)
        return read_range(self, name, begin, end)

    monkeypatch.setattr(Folder, "read_range", noted)
    found = [load_manifest(dataset, cache) for _ in range(3)]
    assert found[0] == found[1] == found[2] == load_manifest(dataset)
    assert fetched == [ROW_GROUPS, ROW_GROUPS]  # the last has no cache
    base = found[0].splits[TRAIN].shards.columns.group_digests
    while not isinstance(base, np.memmap) and base.base is not None:
        base = base.base
    assert isinstance(base, np.memmap)
    piece = Path(cache.folder) / found[0].row_groups.digest  # type: ignore[union-attr]
    del found, base
    piece.write_bytes(bytes(len(piece.read_bytes())))  # it rotted
    assert load_manifest(dataset, cache) == load_manifest(dataset)
    assert HELDOUT not in load_manifest(dataset, cache).splits
    dataset.remove()
