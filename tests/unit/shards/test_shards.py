"""Shards are found, read and checked; one whose bytes changed is named."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared import SEALED, format_8, prepare

from springtide.config import Config
from springtide.config.data import WHOLE, ShardsConfig
from springtide.dataset import open_dataset
from springtide.errors import ConfigError, CorpusError, CorruptShard
from springtide.shards import (
    MANIFEST,
    ROW_GROUPS,
    TOKENIZER,
    TRAIN,
    Manifest,
    Split,
    SplitReader,
    check_shard,
    load_manifest,
    masked,
    most_ids,
    write_shard,
)
from springtide.shards.manifest import FORMAT
from springtide.storage import Folder


def test_rows_are_read_in_the_order_asked_for(tiny: Config) -> None:
    manifest, _ = open_dataset(tiny.shards.dataset)
    reader = SplitReader(Folder(tiny.shards.dataset), manifest, TRAIN)
    rows = np.random.default_rng(0).permutation(manifest.splits[TRAIN].rows)[:200]
    assert np.array_equal(reader.read(rows).sample_ids, rows)


@given(
    rows=st.integers(1, 40),
    length=st.integers(2, 30),
    rows_per_group=st.integers(1, 50),
    token_type=st.sampled_from(["uint16", "uint32"]),
    seed=st.integers(0, 99),
)
def test_what_is_sealed_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: int, length: int, rows_per_group: int, token_type: Any, seed: int
) -> None:
    folder = Folder(tmp_path_factory.mktemp("sealed"))
    config = ShardsConfig(sequence_length=length, rows_per_group=rows_per_group, token_type=token_type)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, np.iinfo(token_type).max, (rows, length + 1), endpoint=True).astype(token_type)
    num_bytes = rng.integers(0, 2**31, rows)
    shard = write_shard(folder, "train-00000.parquet", config, 7, num_bytes, tokens)
    split = Split(documents=1, tokens=1, num_bytes=1, rows=rows, shards=(shard,))
    known = {"vocab_size": most_ids(token_type, True), **SEALED}
    manifest = Manifest(sequence_length=length, token_type=token_type, sources={WHOLE: {TRAIN: split}}, **known)
    wanted = rng.integers(0, rows, 25)
    found = SplitReader(folder, manifest, TRAIN).read(wanted)
    assert np.array_equal(found.sample_ids, wanted + 7)
    assert np.array_equal(found.num_bytes, num_bytes[wanted])
    assert np.array_equal(found.tokens, tokens[wanted])
    assert found.tokens.dtype == token_type
    table = pq.read_table(folder.where(shard.name), page_checksum_verification=True)
    assert table["tokens"].type == pa.list_(
        pa.field("item", pa.from_numpy_dtype(token_type), nullable=False), length + 1
    )
    assert np.array_equal(np.array(table["tokens"].to_pylist()), tokens)


@pytest.mark.parametrize(("token_type", "bad"), [("uint16", 300), ("uint16", 30_000), ("uint32", 2**20)])
def test_an_id_that_the_vocabulary_does_not_have_is_refused(tmp_path: Path, token_type: Any, bad: int) -> None:
    """In a model it is an index out of range, which on a GPU ends the process without a word of where it is from."""
    folder, config = Folder(tmp_path), ShardsConfig(sequence_length=8, rows_per_group=4, token_type=token_type)
    tokens = np.full((8, 9), 299, token_type)
    tokens[6, 4] = masked(np.array([bad], token_type))[0]
    shard = write_shard(folder, "train-00000.parquet", config, 0, np.full(8, 8), tokens)
    split = Split(documents=1, tokens=72, num_bytes=64, rows=8, shards=(shard,))
    facts = {"sequence_length": 8, "token_type": token_type, "sources": {WHOLE: {TRAIN: split}}}
    reader = SplitReader(folder, Manifest(**facts, vocab_size=300, **SEALED), TRAIN)
    assert reader.read(np.arange(4)).tokens.max() == 299
    for _ in range(2):
        with pytest.raises(CorruptShard, match=rf"{shard.name}: row group 1: .*id {bad}.*300 ids"):
            reader.read(np.arange(8))


def test_other_programs_read_shards_as_they_are(tiny: Config, tmp_path: Path) -> None:
    import datasets  # takes seconds, which no other test here needs

    manifest, _ = open_dataset(tiny.shards.dataset)
    shard = manifest.splits[TRAIN].shards[0]
    path = Folder(tiny.shards.dataset).where(shard.name)
    rows = SplitReader(Folder(tiny.shards.dataset), manifest, TRAIN).read(np.arange(shard.rows))
    by_pandas = pandas.read_parquet(path)
    by_duckdb = duckdb.sql(f"select * from '{path}' order by sample_id").df()
    by_datasets = datasets.Dataset.from_parquet(path, cache_dir=str(tmp_path)).to_pandas()
    for found in (by_pandas, by_duckdb, by_datasets):
        assert np.array_equal(found["sample_id"], rows.sample_ids)
        assert np.array_equal(found["num_bytes"], rows.num_bytes)
        assert np.array_equal(np.stack(found["tokens"]), rows.tokens)


def test_shards_are_plain_parquet(tiny: Config) -> None:
    manifest, vocabulary = open_dataset(tiny.shards.dataset)
    table = pq.read_table(Folder(tiny.shards.dataset).where(manifest.splits[TRAIN].shards[0].name))
    assert table.column_names == ["sample_id", "num_bytes", "tokens"]
    assert len(vocabulary.decode(table["tokens"][0].as_py())) > 0


def test_a_dataset_is_prepared_once_and_found_again(tiny: Config) -> None:
    before = Folder(tiny.shards.dataset).fs.info(Folder(tiny.shards.dataset).where(MANIFEST))["mtime"]
    again = prepare(tiny.override({"shards.dataset": "", "optim.peak_lr": 1e-5}))
    assert again.shards.dataset == tiny.shards.dataset
    assert Folder(tiny.shards.dataset).fs.info(Folder(tiny.shards.dataset).where(MANIFEST))["mtime"] == before


def test_preparing_twice_gives_the_same_bytes(tiny: Config, tmp_path: object) -> None:
    elsewhere = prepare(tiny.override({"shards.dataset": "", "shards.root": str(tmp_path)}))
    assert load_manifest(Folder(elsewhere.shards.dataset)) == load_manifest(Folder(tiny.shards.dataset))


ROWS = ("sources", WHOLE, "train")
SOMEWHERE = [(*ROWS, "shards", 0), (*ROWS, "shards", 0, "groups", 0)]


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        (SOMEWHERE[0], {"digest": "../victim/cron"}),
        (SOMEWHERE[0], {"digest": "/etc/cron.d/x"}),
        (SOMEWHERE[0], {"name": "../../etc/passwd"}),
        (SOMEWHERE[0], {"name": "/dev/zero"}),
        (SOMEWHERE[0], {"name": "..parquet"}),
        (SOMEWHERE[0], {"rows": -1}),
        (SOMEWHERE[0], {"rows": 1}),
        (SOMEWHERE[0], {"groups": []}),
        (SOMEWHERE[1], {"digest": "0" * 31 + "/"}),
        (SOMEWHERE[1], {"sample_ids": -8}),
        (SOMEWHERE[1], {"end": 2**63}),
        (SOMEWHERE[1], {"tokens": 10**13, "end": 10**13}),
        (SOMEWHERE[1], {"rows": 10**13}),
        (ROWS, {"rows": 3}),
        (ROWS, {"shards": []}),
        ((), {"token_type": "object"}),
        ((), {"sequence_length": 10**13}),
        ((), {"tokenizer_digest": "../x"}),
        ((), {"vocab_size": 5}),
        ((), {"sources": []}),
        ((), {"sources": {}}),
        ((), {"sources": {WHOLE: {}}}),
        ((), {"row_groups": {"size_bytes": 1, "digest": "0" * 32}}),
        (("sources",), {"../web": {}}),
        (("sources", WHOLE), {"other": {}}),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_refused(
    tiny: Config, tmp_path: Path, place: tuple[Any, ...], changes: dict[str, Any]
) -> None:
    record = format_8(tiny.shards.dataset)
    part: Any = record
    for key in place:
        part = part[key]
    part.update(changes)
    Folder(tmp_path).write_json(MANIFEST, record)
    with pytest.raises(CorpusError, match=r"shards\.dataset = .*manifest") as refused:
        load_manifest(Folder(tmp_path))
    assert "digest expected" not in str(refused.value), "also with the right digest"


@pytest.mark.parametrize("change", [4, -4])
def test_a_number_that_changed_and_still_fits_is_found(tiny: Config, tmp_path: Path, change: int) -> None:
    """The offset of the byte counts: nothing else is checked against it, and bits per byte would be wrong."""
    record = format_8(tiny.shards.dataset)
    record["sources"][WHOLE]["train"]["shards"][0]["groups"][0]["num_bytes"] += change
    for digest in (record["digest"], None):
        Folder(tmp_path).write_json(MANIFEST, {**record, "digest": digest})
        with pytest.raises(CorpusError, match=r"manifest .*digest"):
            load_manifest(Folder(tmp_path))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{", "\xff"])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(CorpusError, match=r"(?s)manifest .*prepare"):
        load_manifest(Folder(tmp_path))


def test_a_dataset_of_another_format_is_refused_with_both_numbers(tiny: Config, tmp_path: Path) -> None:
    record = Folder(tiny.shards.dataset).read_json(MANIFEST)
    Folder(tmp_path).write_json(MANIFEST, {**record, "format": 99, "new": 1})
    with pytest.raises(CorpusError, match=f"format 99.*8 to {FORMAT}"):
        load_manifest(Folder(tmp_path))


@pytest.mark.parametrize("text", [None, "{}"])
def test_a_tokenizer_that_is_not_the_sealed_one_is_refused(tiny: Config, tmp_path: Path, text: str | None) -> None:
    dataset = Folder(tiny.shards.dataset)
    for name in (MANIFEST, ROW_GROUPS):
        Folder(tmp_path).write(name, dataset.read(name))
    Folder(tmp_path).write(TOKENIZER, text or dataset.read(TOKENIZER).replace(b'"a"', b'"b"'))
    with pytest.raises(CorpusError, match=r"tokenizer\.json: .*digest"):
        open_dataset(str(tmp_path))


def test_half_a_dataset_is_made_again(tiny: Config, tmp_path: object) -> None:
    unprepared = tiny.override({"shards.dataset": "", "shards.root": str(tmp_path)})
    dataset = Folder(shutil.copytree(tiny.shards.dataset, f"{tmp_path}/{Path(tiny.shards.dataset).name}"))
    dataset.remove(MANIFEST)
    dataset.write("train-00000.parquet", b"what a killed prepare left")
    with pytest.raises(CorpusError, match="springtide data prepare"):
        load_manifest(dataset)
    again = prepare(unprepared).shards.dataset
    assert again == dataset.url
    manifest, _ = open_dataset(again)
    check_shard(dataset, manifest.splits[TRAIN].shards[0])


@pytest.mark.parametrize("where", [0.001, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("how", ["flip", "cut"])
def test_a_shard_that_changed_is_named_with_both_digests(
    tiny: Config, tmp_path: object, where: float, how: str
) -> None:
    dataset = Folder(shutil.copytree(tiny.shards.dataset, f"{tmp_path}/data"))
    manifest, _ = open_dataset(dataset.url)
    split = manifest.splits[TRAIN]
    shard = split.shards[0]
    data = bytearray(dataset.read(shard.name))
    place = int(where * len(data))
    if how == "flip":
        data[place] ^= 0x10
    else:
        del data[place:]
    dataset.write(shard.name, bytes(data))
    with pytest.raises(CorruptShard, match=rf"{shard.name}.*expected {shard.digest}, found [0-9a-f]{{32}}"):
        check_shard(dataset, shard)
    # a flip in bytes that no row depends on (a statistic, padding) may pass; rows that differ may not
    good = SplitReader(Folder(tiny.shards.dataset), manifest, TRAIN).read(np.arange(shard.rows))
    with contextlib.suppress(CorruptShard):
        found = SplitReader(dataset, manifest, TRAIN).read(np.arange(shard.rows))
        assert np.array_equal(found.tokens, good.tokens)
        assert np.array_equal(found.sample_ids, good.sample_ids)


def test_what_cannot_be_packed_is_refused_before_anything_is_sealed(tiny: Config, tmp_path: object) -> None:
    unprepared = tiny.override({"shards.dataset": "", "shards.root": str(tmp_path), "corpus.max_files": 2})
    long = {"shards.sequence_length": 100_000, "model.max_sequence_length": 100_000, "train.total": "2B"}
    with pytest.raises(CorpusError, match=r"shards\.sequence_length = 100000: .*split"):
        prepare(unprepared.override(long))


@pytest.mark.processes
def test_a_vocabulary_too_large_for_the_token_type_is_refused(tiny: Config, tmp_path: object) -> None:
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(70_000)} | {"<|endoftext|>": 70_000}
    path = f"{tmp_path}/tokenizer.json"
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.save(path)
    changes = {"shards.dataset": "", "shards.root": str(tmp_path), "corpus.tokenizer": path}
    with pytest.raises(ConfigError, match=r"shards\.token_type = 'uint16': .*65536 ids.*70001.*uint32"):
        prepare(tiny.override(changes))
