"""Token ids that people have already become the dataset that their text becomes, byte for byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import token_files
from prepared import contents, prepare, small, write_corpus

from springtide.corpus import Broken, Document, Tokenizer, documents, open_source, open_tokenizer, sources
from springtide.corpus import token_files as token_readers
from springtide.errors import ConfigError, CorpusError

pytestmark = pytest.mark.processes


class Made(NamedTuple):
    """A corpus, its tokenizer, and the dataset that was made of the text."""

    vocabulary: Tokenizer
    tokenizer: str
    texts: list[str]
    shards: dict[str, str]
    given: list[np.ndarray] | None = None

    @property
    def ids(self) -> list[np.ndarray]:
        """The ids of each text, without an end-of-text id."""
        return self.given or [ids[:-1] for ids in self.vocabulary.encode(self.texts)]

    @property
    def end(self) -> int:
        return self.vocabulary.end_of_text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("text")
    texts = write_corpus(root / "corpus")
    texts.append("Grüße, 世界 \U0001f30a\n\n\ttabs and lines\n")
    (root / "corpus" / "last.txt").write_text(texts[-1])
    tokenizer = root / "tokenizer.json"
    tokenizer.write_text(open_tokenizer("bpe", texts, 400).to_json())
    config = prepare(small(root / "made", root / "corpus", corpus__tokenizer=str(tokenizer)))
    vocabulary = open_tokenizer(str(tokenizer), (), 0)
    return Made(vocabulary, str(tokenizer), texts, contents(config.shards.dataset))


def _array(folder: Path, made: Made, name: str, **options: Any) -> None:
    ids = token_files.array(made.ids, made.end, **options)
    if name.endswith(".npy"):
        np.save(folder / name, ids)
    else:
        ids.tofile(folder / name)


def _matrix(folder: Path, made: Made) -> None:
    ids = token_files.array(made.ids, made.end)
    filled = np.concatenate([ids, np.full(-len(ids) % 64, made.end, dtype=ids.dtype)])
    np.save(folder / "rows.npy", filled.reshape(-1, 64))


def _ended(made: Made) -> list[np.ndarray]:
    return [np.append(ids, made.end) for ids in made.ids]


Layout = Callable[[Path, Made], None]
LAYOUTS: dict[str, Layout] = {
    "megatron": lambda folder, made: token_files.megatron(folder, made.ids),
    "megatron, int32, end-of-text ids": lambda folder, made: token_files.megatron(folder, _ended(made), "int32"),
    "mds": lambda folder, made: token_files.mds(folder, made.ids),
    "mds, zstd": lambda folder, made: token_files.mds(folder, made.ids, "ndarray", "zstd"),
    "mds, bytes": lambda folder, made: token_files.mds(folder, _ended(made), "bytes"),
    "litdata": lambda folder, made: token_files.litdata(folder, made.ids),
    "litdata, trees": lambda folder, made: token_files.litdata(folder, _ended(made), "PyTreeLoader"),
    "npy": lambda folder, made: _array(folder, made, "a.npy"),
    "npy, int64, ends first": lambda folder, made: _array(folder, made, "a.npy", kind="int64", end_first=True),
    "npy, rows": _matrix,
    "bin": lambda folder, made: _array(folder, made, "train.bin"),
    "bin, uint32": lambda folder, made: _array(folder, made, "train.bin", kind="uint32"),
    "bin, llm.c": lambda folder, made: token_files.llm_c(folder / "a.bin", token_files.array(made.ids, made.end)),
    "jsonl": lambda folder, made: token_files.records(folder, made.ids, "a.jsonl"),
    "parquet": lambda folder, made: token_files.records(folder, _ended(made), "a.parquet"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_ids_and_the_texts(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(sources, "_UNIT_BYTES", 5_001)  # documents cross the bounds of ranges, ids too
    LAYOUTS[layout](tmp_path, made)
    found = read(made, tmp_path)
    assert sorted(one.text for one in found if isinstance(one, Document)) == sorted(made.texts)
    ids = sorted(one.ids.tolist() for one in found if isinstance(one, Document) and one.ids is not None)
    assert ids == sorted(ids.tolist() for ids in made.ids)


@pytest.mark.parametrize("layout", ["megatron", "mds, zstd", "npy"])
def test_token_ids_become_the_shards_of_their_text(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(sources, "_UNIT_BYTES", 25_001)
    source = tmp_path / "tokens"
    source.mkdir()
    LAYOUTS[layout](source, made)
    config = prepare(small(tmp_path / "made", source, corpus__tokenizer=made.tokenizer))
    found = contents(config.shards.dataset)
    assert {name: digest for name, digest in found.items() if name.endswith(".parquet")} == {
        name: digest for name, digest in made.shards.items() if name.endswith(".parquet")
    }


def test_text_and_its_token_ids_are_duplicates(tmp_path: Path, made: Made) -> None:
    source = tmp_path / "both"
    source.mkdir()
    token_files.megatron(source, made.ids[:150])
    for number, text in enumerate(made.texts[100:]):
        (source / f"{number}.txt").write_text(text)
    config = prepare(small(tmp_path / "made", source, corpus__tokenizer=made.tokenizer))
    assert contents(config.shards.dataset)["train-00000.parquet"] == made.shards["train-00000.parquet"]


def read(made: Made, folder: Path) -> list[Document | Broken]:
    source = open_source(str(folder))
    source.fingerprint()
    return [one for unit in source.units() for one in source.read(unit, made.vocabulary)]


def _edit(file: Path, place: int, data: bytes) -> None:
    before = file.read_bytes()
    file.write_bytes(before[:place] + data + before[place + len(data) :])


def _edit_index(folder: Path, *path: str | int, value: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    holder: Any = index
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    (folder / "index.json").write_text(json.dumps(index))


def test_data_outside_the_index_folder_is_not_read(made: Made, tmp_path: Path) -> None:
    """Data of an index is not read through a link out of its folder.

    A file or a glob names the index alone. Links to files of one folder, both of one's own, are read."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    for folder in (theirs, mine):
        folder.mkdir()
    token_files.megatron(mine, made.ids, name="x")
    (theirs / "x.idx").write_bytes((mine / "x.idx").read_bytes())
    (theirs / "x.bin").symlink_to(mine / "x.bin")
    for source in ("*.idx", "x.idx"):
        with pytest.raises(CorpusError, match=r"x\.bin.*tokens"):
            open_source(str(theirs / source))
    (theirs / "x.idx").unlink()
    (theirs / "x.idx").symlink_to(mine / "x.idx")
    assert open_source(str(theirs / "x.idx")).beside == ("x.bin",)


IDX, BIN, MDS, CHUNK = "a_text_document.idx", "a_text_document.bin", "shard.00000.mds", "chunk-0-0.bin"
HOSTILE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "another magic": ("megatron", lambda at: _edit(at / IDX, 0, b"TNTIDX"), f"{IDX}.*header: it begins with"),
    "another version": ("megatron", lambda at: _edit(at / IDX, 9, struct.pack("<Q", 2)), f"{IDX}.*version 2"),
    "an unknown type": ("megatron", lambda at: _edit(at / IDX, 17, b"\x63"), f"{IDX}.*type 99 of a token"),
    "floats": ("megatron", lambda at: _edit(at / IDX, 17, b"\x06"), f"{IDX}.*type 6 of a token"),
    "a huge count": (
        "megatron",
        lambda at: _edit(at / IDX, 18, struct.pack("<Q", 2**62)),
        f"{IDX}.*4611686018427387904 sequences and .* bytes",
    ),
    "a negative length": (
        "megatron",
        lambda at: _edit(at / IDX, 34, struct.pack("<i", -5)),
        f"{IDX}.*sequence 0: length -5",
    ),
    "a length that lies": (
        "megatron",
        lambda at: _edit(at / IDX, 34, struct.pack("<i", 2**30)),
        f"{IDX}.*sequence 0: length 1073741824 at byte 0",
    ),
    "a cut index": ("megatron", lambda at: (at / IDX).write_bytes((at / IDX).read_bytes()[:500]), f"{IDX}.*header"),
    "an empty index": ("megatron", lambda at: (at / IDX).write_bytes(b""), f"{IDX}.*header"),
    "cut data": ("megatron", lambda at: (at / BIN).write_bytes((at / BIN).read_bytes()[:500]), f"{IDX}.*has 500 bytes"),
    "no data": ("megatron", lambda at: (at / BIN).unlink(), f"{IDX}.*{BIN}, which holds its tokens"),
    "many samples": ("mds", lambda at: _edit(at / MDS, 0, struct.pack("<I", 2**32 - 1)), f"{MDS}.*number of samples"),
    "an offset that lies": ("mds", lambda at: _edit(at / MDS, 8, struct.pack("<I", 1)), f"{MDS}.*sample 0: from byte"),
    "an offset that is large": (
        "mds",
        lambda at: _edit(at / MDS, 8, struct.pack("<I", 2**31)),
        f"{MDS}.*sample 0: from byte .* to 2147483648",
    ),
    "a cut shard": ("mds", lambda at: (at / MDS).write_bytes((at / MDS).read_bytes()[:3000]), f"{MDS}.*the file ends"),
    "a file outside": (
        "mds",
        lambda at: _edit_index(at, "shards", 0, "raw_data", "basename", value="../../etc/passwd"),
        r"index.json.*shards\[0\]: '../../etc/passwd' is not the name of a file in its folder",
    ),
    "a file that is not there": (
        "mds",
        lambda at: (at / MDS).unlink(),
        rf"index.json.*shards\[0\]: {MDS} is not in the source",
    ),
    "no list": ("mds", lambda at: _edit_index(at, "shards", value=7), "index.json.*shards: it is not a list"),
    "no JSON": ("mds", lambda at: (at / "index.json").write_text("[" * 100_000), "index.json.*is not JSON"),
    "a pickle": (
        "mds",
        lambda at: (at / MDS).write_bytes((at / MDS).read_bytes().replace(b'"ndarray:uint16"', b'"pkl"           ')),
        f"{MDS}.*column 'tokens': encoding 'pkl'",
    ),
    "another format": (
        "litdata",
        lambda at: _edit_index(at, "config", "data_format", value=["jpeg", "int"]),
        r"index.json.*config.data_format: \['jpeg', 'int'\]",
    ),
    "encrypted": ("litdata", lambda at: _edit_index(at, "config", "encryption", value={"a": 1}), "config.encryption"),
    "a cut chunk": (
        "litdata",
        lambda at: (at / CHUNK).write_bytes((at / CHUNK).read_bytes()[:999]),
        f"{CHUNK}.*file ends",
    ),
    "a header that lies": (
        "npy",
        lambda at: (at / "a.npy").write_bytes((at / "a.npy").read_bytes()[:5000]),
        "a.npy.*its header says [0-9]+ ids, the file holds 24[0-9]+",
    ),
    "pickled objects": (
        "npy",
        lambda at: np.save(at / "a.npy", np.array([{}], dtype=object), allow_pickle=True),
        "a.npy.*header: it holds object",
    ),
    "a header that is code": (
        "npy",
        lambda at: _edit(at / "a.npy", 10, b"{'descr': __import__('os').system('false'), "),
        "a.npy.*header",
    ),
    "half an id": (
        "bin",
        lambda at: (at / "train.bin").write_bytes(b"abc"),
        "train.bin.*its 3 bytes are not whole ids",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_lying_file_is_refused_with_name_and_field(tmp_path: Path, made: Made, what: str) -> None:
    """A file that lies is refused with its name and the field."""
    layout, damage, error = HOSTILE[what]
    LAYOUTS[layout](tmp_path, made)
    assert read(made, tmp_path)
    damage(tmp_path)
    with pytest.raises(CorpusError, match=error) as caught:
        read(made, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "exclude it" in str(caught.value)


@pytest.mark.parametrize(
    "layout", ["megatron, int32, end-of-text ids", "mds, bytes", "npy, int64, ends first", "jsonl"]
)
@pytest.mark.parametrize("wrong", [-1, 400])
def test_an_id_out_of_range_names_file_document_and_id(tmp_path: Path, made: Made, layout: str, wrong: int) -> None:
    """An id out of range is refused with the file the document and the id."""
    ids = made.ids[:30]
    ids[7] = ids[7].astype(np.int64)
    ids[7][3] = wrong
    LAYOUTS[layout](tmp_path, made._replace(given=ids))
    error = rf"{tmp_path}.*, document [0-9/]+, token \d+': is id {wrong}, the tokenizer has the ids below 400"
    with pytest.raises(CorpusError, match=error):
        read(made, tmp_path)


def test_token_ids_need_the_name_of_their_tokenizer(tmp_path: Path, made: Made) -> None:
    source = tmp_path / "tokens"
    source.mkdir()
    token_files.records(source, [np.arange(50)] * 40, "a.jsonl")
    with pytest.raises(ConfigError, match=r"corpus\.tokenizer = 'bpe': .*a\.jsonl@0"):
        prepare(small(tmp_path / "made", source, corpus__tokenizer="bpe"))


def test_a_document_of_too_many_tokens_is_skipped(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document of too many tokens is broken and the rest is read."""
    for module in (documents, token_readers):
        monkeypatch.setattr(module, "MOST_TOKENS", 1000)
    monkeypatch.setattr(token_readers, "_READ_TOKENS", 700)
    ids = [np.arange(20) + 1, np.arange(5000) % 99 + 1, np.arange(30) + 1]
    np.save(tmp_path / "a.npy", token_files.array(ids, made.end))
    one, broken, three = read(made, tmp_path)
    assert isinstance(broken, Broken)
    assert broken.reason == "longer than 1,000 tokens without an end-of-text id"
    assert [len(found.ids) for found in (one, three) if isinstance(found, Document) and found.ids is not None] == [
        20,
        30,
    ]


def test_ids_without_text_are_distinct_documents(made: Made) -> None:
    """Ids that spell no text are other documents though they look equal."""
    one, other = (Document("a", "\ufffd", np.array([number], dtype=np.uint32)) for number in (1, 2))
    assert one.digest != other.digest
    assert one.digest == Document("b", "\ufffd", np.array([1], dtype=np.uint32)).digest


def test_samples_may_be_text(tmp_path: Path, made: Made) -> None:
    columns = {
        "column_names": ["text"],
        "column_encodings": ["str"],
        "column_sizes": [None],
        "version": 2,
        "format": "mds",
    }
    samples = [struct.pack("<I", len(text)) + text for text in (b"one", b"two \xff")]
    (tmp_path / "a.mds").write_bytes(token_files.chunk(samples, json.dumps(columns).encode()))
    source = open_source(str(tmp_path))
    assert [one.text for one in source.documents()] == ["one", "two \ufffd"]
