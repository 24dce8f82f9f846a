"""Text to a sealed dataset: nothing lost, nothing twice, the same bytes however it was interrupted or shared out."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import LENGTH, contents, prepare, small, write_corpus

import springtide as st
from springtide import config as configs
from springtide.corpus import BANDS, CorpusReader, open_source, open_tokenizer, sources
from springtide.dataset import open_dataset
from springtide.dataset.columns import Sizes
from springtide.dataset.make import check_room
from springtide.dataset.near import near_duplicates_among
from springtide.dataset.segments import Segment
from springtide.errors import ConfigError, CorpusError, DamagedFile
from springtide.shards import HELDOUT, TRAIN, SplitReader, check_shard, ids_of, is_predicted
from springtide.storage import Folder

SmallDisk = Callable[[Path, list[str]], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_UNIT_BYTES", 8_000)


@pytest.mark.usefixtures("small_units")
def test_rows_are_the_kept_documents_in_key_order(tmp_path: Path) -> None:
    """Rows are the kept documents end to end in the order of their keys."""
    texts = write_corpus(tmp_path / "text")
    config = small(tmp_path / "data", tmp_path / "text", corpus__near_duplicates=False)
    dataset = prepare(config).shards.dataset
    manifest, vocabulary = open_dataset(dataset)
    digests = {hashlib.blake2b(text.encode(), digest_size=16).digest(): text for text in texts}
    key = (0).to_bytes(8, "little")
    order = sorted(digests, key=lambda digest: hashlib.blake2b(digest, key=key, digest_size=16).digest())
    held_out = [int.from_bytes(digest[:8], "little") / 2**64 < 0.1 for digest in order]
    for split, wanted in ((TRAIN, False), (HELDOUT, True)):
        mine = [digests[digest] for digest, held in zip(order, held_out, strict=True) if held is wanted]
        line = np.concatenate(list(vocabulary.encode(mine)))
        found = manifest.splits[split]
        assert (found.documents, found.tokens, found.rows) == (len(mine), len(line), (len(line) - 1) // LENGTH)
        rows = SplitReader(Folder(dataset), manifest, split).read(np.arange(found.rows))
        assert np.array_equal(rows.tokens[:, :-1].ravel(), line[: found.rows * LENGTH])
        assert np.array_equal(rows.tokens[:, 1:].ravel(), line[1 : found.rows * LENGTH + 1])
        assert np.array_equal(rows.num_bytes, vocabulary.byte_lengths()[rows.tokens[:, 1:]].sum(axis=1))
        assert rows.sample_ids.tolist() == list(range(found.rows))
        for shard in found.shards:
            check_shard(Folder(dataset), shard)
    assert len(manifest.splits[TRAIN].shards) > 5
    assert manifest.source["documents"] == len(texts)
    assert manifest.source["dropped"] == {"duplicate": 10}
    assert not (Path(dataset) / "work").exists()


@pytest.mark.processes
def test_a_vocabulary_with_wrong_byte_counts_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A vocabulary that counts other bytes than the text has is told."""
    from tokenizers import Tokenizer, normalizers

    write_corpus(tmp_path / "text", documents=40)
    (tmp_path / "text" / "0000.txt").write_text("caf\u00e9 " * 90)
    plain = open_tokenizer("bytes", [], 0).to_json()
    for strips in (False, True):
        tokenizer, path = Tokenizer.from_str(plain), tmp_path / f"{strips}.json"
        if strips:
            tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
        tokenizer.save(str(path))
        prepare(small(tmp_path / "data", tmp_path / "text", corpus__tokenizer=str(path)))
        told = [record.getMessage() for record in caplog.records if "corpus.tokenizer = " in record.getMessage()]
        assert len(told) == strips
    assert "1 of which differ; bits per byte are off" in told[0]
    assert "(normalizer: NFD, StripAccents)" in told[0]


@pytest.mark.processes
def test_bytes_of_ids_with_the_top_bit_are_counted(tmp_path: Path) -> None:
    """Without tokens that are not predicted, uint16 holds 65,536 ids."""
    from tokenizers import Tokenizer

    write_corpus(tmp_path / "text", 40)
    spec = json.loads(open_tokenizer("bytes", [], 0).to_json())
    vocab = spec["model"]["vocab"]
    fillers = {f"filler{number}": number for number in range(40_000) if number != 256}
    spec["model"]["vocab"] = {word: 40_000 + id if id < 256 else id for word, id in vocab.items()} | fillers
    Tokenizer.from_str(json.dumps(spec)).save(str(tmp_path / "large.json"))
    counted = []
    for token_type in ("uint16", "uint32"):
        changes = {"corpus__tokenizer": str(tmp_path / "large.json"), "shards__token_type": token_type}
        manifest, _ = open_dataset(prepare(small(tmp_path / "data", tmp_path / "text", **changes)).shards.dataset)
        assert manifest.vocab_size > 2**15
        counted.append(manifest.splits[TRAIN].num_bytes)
    assert counted[0] == counted[1] > 1000


@pytest.mark.usefixtures("small_units")
def test_near_copies_are_left_out_and_counted(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    manifest, _ = open_dataset(prepare(small(tmp_path / "data", tmp_path / "text")).shards.dataset)
    assert manifest.source["dropped"] == {"duplicate": 10, "near duplicate": 10}
    assert sum(split.documents for split in manifest.splits.values()) == 240


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_documents_kept_apart_lose_no_byte(tmp_path: Path, packing: str) -> None:
    texts = write_corpus(tmp_path / "text")
    changes = {"shards__packing": packing, "shards__mask_across_documents": True, "corpus__near_duplicates": False}
    config = small(tmp_path / "data", tmp_path / "text", shards__sequence_length=600, **changes)
    dataset = prepare(config).shards.dataset
    manifest, vocabulary = open_dataset(dataset)
    found: set[str] = set()
    for name, split in manifest.splits.items():
        rows = SplitReader(Folder(dataset), manifest, name).read(np.arange(split.rows))
        ids, after = ids_of(rows.tokens), is_predicted(rows.tokens)[:, 1:]
        counted = np.where(after, vocabulary.byte_lengths()[ids[:, 1:]], 0).sum(axis=1)
        assert np.array_equal(rows.num_bytes, counted)
        for row in ids:
            ends = np.flatnonzero(row == manifest.end_of_text)
            found |= {vocabulary.decode(part.tolist()) for part in np.split(row, ends + 1)}
    whole = [text for text in set(texts) if len(text) <= 600]
    assert len(whole) > 40
    if packing == "best_fit":
        assert set(whole) <= found
        assert sum(split.num_bytes for split in manifest.splits.values()) == sum(map(len, set(texts)))
    else:
        assert not set(whole) <= found


def backwards(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    return (function(item) for item in reversed(items))


def in_processes(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    with ProcessPoolExecutor(2) as pool:
        yield from pool.map(function, items)


@pytest.mark.processes
@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("run", [backwards, in_processes])
def test_the_bytes_do_not_depend_on_who_makes_what_when(tmp_path: Path, run: Any) -> None:
    write_corpus(tmp_path / "text")
    one = prepare(small(tmp_path / "one", tmp_path / "text")).shards.dataset
    other = prepare(small(tmp_path / "other", tmp_path / "text"), run=run).shards.dataset
    assert contents(one) == contents(other)


@pytest.mark.processes
def test_killed_at_random_moments_it_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9, three times; the moments are drawn anew each time the test runs, and named when it fails."""
    write_corpus(tmp_path / "text", 2000)
    script = (
        "import sys; from springtide import config; from springtide.corpus import sources;"
        "from springtide.dataset import make_dataset; read = config.load_config(sys.argv[1]);"
        "sources._UNIT_BYTES = 40_000; make_dataset(read.corpus, read.shards)"
    )

    def start(root: str) -> subprocess.Popen[bytes]:
        config = small(tmp_path / root, tmp_path / "text")
        (tmp_path / f"{root}.yaml").write_text(configs.dump(config))
        return subprocess.Popen([sys.executable, "-c", script, str(tmp_path / f"{root}.yaml")])

    monkeypatch.setattr(sources, "_UNIT_BYTES", 40_000)
    whole = Path(prepare(small(tmp_path / "whole", tmp_path / "text")).shards.dataset)
    made = len(list(whole.iterdir())) + len(open_source(str(tmp_path / "text")).names) // 40
    moments = sorted(random.sample(range(1, made), 3))
    for files in moments:
        process = start("killed")
        while process.poll() is None and len(list((tmp_path / "killed").rglob("*.*"))) < files:
            time.sleep(0.001)  # until so many files are there
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
    assert start("killed").wait(120) == 0
    [killed] = (tmp_path / "killed").iterdir()
    assert contents(str(killed)) == contents(str(whole)), f"killed at {moments} files"


def test_a_broken_line_among_many_is_counted_and_shown(tmp_path: Path) -> None:
    lines = [f'{{"text": "document {number} of some length, {number * 7919}"}}' for number in range(500)]
    lines[250] = '{"text": "never closed'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = small(tmp_path / "data", tmp_path / "a.jsonl", corpus__near_duplicates=False)
    manifest, _ = open_dataset(prepare(config).shards.dataset)
    assert manifest.source["dropped"] == {"not JSON": 1, "duplicate": 0}
    assert [broken["sample"] for broken in manifest.source["broken"]] == ['{"text": "never closed']


def test_filters_drop_for_a_reason_that_is_counted(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", 60)
    (tmp_path / "text" / "short.txt").write_text("short")
    config = small(tmp_path / "data", tmp_path / "text", corpus__min_characters=10)
    manifest, _ = open_dataset(prepare(config).shards.dataset)
    assert manifest.source["dropped"]["short"] == 1


def test_each_source_has_its_own_field_and_filters(tmp_path: Path) -> None:
    texts = write_corpus(tmp_path / "text", 60)
    records = [{"body": f"{text} told again"} for text in texts[:30]] + [{"body": "tiny"}, {"text": "elsewhere"}]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, records)))
    sources = {
        "text": {"source": str(tmp_path / "text"), "max_characters": 500},
        "lines": {"source": str(tmp_path / "lines.jsonl"), "field": "body", "min_characters": 20},
    }
    config = small(tmp_path / "data", tmp_path / "nowhere", corpus__sources=sources, corpus__near_duplicates=False)
    manifest, _ = open_dataset(prepare(config).shards.dataset)
    source = manifest.source
    short = [text for text in texts if len(text) <= 500]
    assert 5 < len(short) < len(texts) - 5
    assert source["documents"] == len(texts) + len(records)
    assert source["dropped"]["long"] == len(texts) - len(short)
    assert source["dropped"]["short"] == 1
    assert source["dropped"]["no text in 'body'"] == 1
    kept = sum(split.documents for split in manifest.splits.values())
    assert kept == len(set(short)) + len({record.get("body") for record in records[:30]})
    assert [group for group, _ in source["tokens_by_group"]][:2] == ["lines", "text"]
    assert source["source"] == f"{tmp_path / 'text'}, {tmp_path / 'lines.jsonl'}"
    # what differs for a source is part of what the dataset is
    other = config.override({"corpus.sources": {**sources, "text": {**sources["text"], "max_characters": 501}}})
    assert prepare(other).shards.dataset != prepare(config).shards.dataset


def test_a_source_with_a_wrong_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"corpus\.sources.*minimum_characters"):
        small(tmp_path / "data", tmp_path, corpus__sources={"x": {"source": "x", "minimum_characters": 3}})
    for name in ("a/b", "", "../x", "web "):
        with pytest.raises(ConfigError, match=r"corpus\.sources"):
            small(tmp_path / "data", tmp_path, corpus__sources={name: "x"})


@pytest.mark.processes
def test_a_full_disk_is_named_and_what_is_made_is_kept(tmp_path: Path, small_disk: SmallDisk) -> None:
    write_corpus(tmp_path / "text", 2000)
    (tmp_path / "config.yaml").write_text(configs.dump(small(tmp_path / "disk", tmp_path / "text")))
    script = (
        "import sys; from springtide import config; from springtide.corpus import sources;"
        "from springtide.dataset import make; read = config.load_config(sys.argv[1]);"
        "sources._UNIT_BYTES = 40_000; make.check_room = lambda *_: None; make.make_dataset(read.corpus, read.shards)"
    )
    command = f"{sys.executable} -c '{script}' {tmp_path}/config.yaml; ls -R {tmp_path}/disk"
    done = small_disk(tmp_path / "disk", ["sh", "-c", command])
    assert "the disk is full" in done.stderr, done.stderr[-2000:]
    assert "same command" in done.stderr
    assert ".tmp-" not in done.stdout
    assert "000000-counts.json" in done.stdout
    assert "manifest.json" not in done.stdout


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "text", 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 5_000))
    with pytest.raises(CorpusError, match=r"shards\.root = .*free"):
        prepare(small(tmp_path, tmp_path / "text"))


def test_room_counts_what_a_killed_prepare_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is what is free and what a killed prepare has written.

    No file of the source is asked for its size: the listing told it."""
    write_corpus(tmp_path / "text", 20)
    source, dataset = open_source(str(tmp_path / "text")), Folder(tmp_path / "data" / "0123")
    size, free = sum(file.stat().st_size for file in (tmp_path / "text").iterdir()), [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, free[-1]))
    monkeypatch.setattr(Folder, "size", lambda *_: pytest.fail("asked for a size"))
    for parts, left in ((0, 3 * size), (2 * size, size)):
        dataset.write("work/parts", bytes(parts))
        free.append(left)
        check_room([source], dataset)
    free.append(size // 2)
    with pytest.raises(CorpusError, match=r"three times"):
        check_room([source], dataset)


def test_units_of_a_source_cover_every_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path, 50)
    monkeypatch.setattr(sources, "_UNIT_FILES", 7)
    source: CorpusReader = open_source(str(tmp_path))
    units = source.units()
    assert [name for unit in units for name in unit.names] == list(source.names)
    assert max(len(unit.names) for unit in units) == 7


@pytest.mark.processes
def test_a_changed_tokenizer_file_makes_another_dataset(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", 40)
    path = tmp_path / "tokenizer.json"
    path.write_text(open_tokenizer("bytes", [], 0).to_json())
    config = small(tmp_path / "data", tmp_path / "text", corpus__tokenizer=str(path))
    first = prepare(config).shards.dataset
    assert prepare(config).shards.dataset == first
    path.write_text(open_tokenizer("bytes", [], 0, special_tokens=["<|pad|>"]).to_json())
    second = prepare(config).shards.dataset
    assert second != first
    assert open_dataset(second)[0].vocab_size == open_dataset(first)[0].vocab_size + 1


@pytest.mark.usefixtures("small_units")
def test_a_file_that_changes_while_it_is_read_seals_nothing(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", 60)
    file, config = tmp_path / "text" / "0000.txt", small(tmp_path / "data", tmp_path / "text")

    def rewritten(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        yield from map(function, items)
        file.write_text("other words")
        (tmp_path / "text" / "more.txt").write_text("words that nobody read")

    changed = (
        r"corpus\.source = .*0000\.txt': changed while it was read \(1 such file.*nothing was sealed; run .* again"
    )
    with pytest.raises(CorpusError, match=changed):
        prepare(config, run=rewritten)
    assert list((tmp_path / "data").iterdir()) == []
    dataset = prepare(config).shards.dataset
    assert open_dataset(dataset)[0].source["documents"] == 81


@pytest.mark.parametrize("step", ["remove", "sweep"])
def test_a_prepare_killed_at_the_manifest_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Killed when the manifest is written the next call clears up and writes the card."""
    write_corpus(tmp_path / "text", 40)
    config = small(tmp_path / "data", tmp_path / "text")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Folder, step, killed)
        with pytest.raises(KeyboardInterrupt):
            st.prepare(config)
    [dataset] = (tmp_path / "data").iterdir()
    (dataset / ".tmp-of-a-killed-write").touch()
    assert (dataset / "manifest.json").exists()
    assert (dataset / "work").exists()
    assert st.prepare(config).shards.dataset == str(dataset)
    assert not (dataset / "work").exists()
    assert not (dataset / ".tmp-of-a-killed-write").exists()
    assert "Dataset" in (dataset / "card.html").read_text()


@pytest.mark.parametrize("cut", [1, 8])
def test_rows_of_near_duplicates_that_are_cut_are_named(tmp_path: Path, cut: int) -> None:
    work, segment = Folder(tmp_path), Segment(0, "", Sizes(1, 0, 0))
    for band in range(BANDS):
        work.write(f"near/{band:02d}.rows", b"\0" * (32 - cut * (band == 3)))
    with pytest.raises(DamagedFile, match=rf"near/03\.rows: .*{32 - cut} bytes"):
        near_duplicates_among(work, [segment], "uint16", np.zeros(0, np.int64))
