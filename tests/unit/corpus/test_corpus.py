"""Documents and vocabularies."""

from __future__ import annotations

import gzip
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from springtide.config.data import CorpusConfig
from springtide.corpus import (
    Broken,
    CorpusReader,
    Document,
    Tokenizer,
    clean,
    documents,
    open_source,
    open_tokenizer,
    sources,
)
from springtide.corpus.documents import Tokens
from springtide.corpus.tokenizer import byte_tokenizer, train_bpe
from springtide.errors import ConfigError, CorpusError
from springtide.storage import Folder

BPE = train_bpe(["def one(two): return three\n" * 20, "class Four:\n    pass\n" * 20], 300)
BYTES = byte_tokenizer()


@given(st.text(), st.sampled_from([BPE, BYTES]))
def test_text_comes_back_and_every_byte_is_accounted_for(text: str, vocabulary: Tokenizer) -> None:
    [ids] = vocabulary.encode([text])
    assert ids[-1] == vocabulary.end_of_text
    assert vocabulary.decode(ids.tolist()) == text
    assert vocabulary.byte_lengths()[ids].sum() == len(text.encode())


def test_a_byte_vocabulary_has_257_ids() -> None:
    assert BYTES.size == 257
    assert Tokenizer.from_json(BYTES.to_json()).size == 257


@pytest.mark.processes
def test_a_vocabulary_survives_its_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(BPE.to_json())
    again = open_tokenizer(str(tmp_path / "tokenizer.json"), [], 0)
    assert again.tokenizer.get_vocab() == BPE.tokenizer.get_vocab()
    with pytest.raises(ConfigError, match=r"'bpe'.*'bytes'.*'tiktoken:NAME'"):
        open_tokenizer("bqe", [], 300)


def test_sources_are_folders_files_and_globs(tmp_path: Path) -> None:
    for name in ("a.txt", "sub/b.txt", "sub/c.md", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert open_source(str(tmp_path)).names == ("a.txt", "sub/b.txt", "sub/c.md")
    assert open_source(str(tmp_path / "a.txt")).names == ("a.txt",)
    assert open_source(str(tmp_path / "**/*.txt")).names == ("a.txt", "sub/b.txt")
    assert open_source(str(tmp_path), max_files=2).names == ("a.txt", "sub/b.txt")
    assert [document.text for document in open_source(str(tmp_path / "sub")).documents()] == ["sub/b.txt", "sub/c.md"]


def test_hidden_folders_are_read_only_where_a_pattern_names_them(tmp_path: Path) -> None:
    for name in ("a.txt", ".aws/credentials.txt", "sub/.git/config.txt", ".github/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert open_source(str(tmp_path)).names == ("a.txt",)
    assert open_source(str(tmp_path / "**/*.txt")).names == ("a.txt",)
    assert open_source(str(tmp_path / ".github")).names == ("b.txt",)
    assert open_source(str(tmp_path / ".git*/*.txt")).names == (".github/b.txt",)


def test_links_that_lead_out_of_a_folder_are_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "secret.txt").write_text("of another user")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "b.txt").write_text("b")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("a")
    (corpus / "same.txt").symlink_to("a.txt")
    (corpus / "innocent.txt").symlink_to(tmp_path / "secret.txt")
    (corpus / "folder").symlink_to(tmp_path / "others")
    assert open_source(str(corpus)).names == ("a.txt", "same.txt")
    assert open_source(str(corpus / "**/*.txt")).names == ("a.txt", "same.txt")
    assert "2 links" in caplog.text
    assert open_source(str(corpus / "innocent.txt")).names == ("innocent.txt",)  # named by the user
    for name in ("a.txt", "same.txt"):
        (corpus / name).unlink()
    only = r"holds only {} links that lead out of it or to a folder; give the folder that they lead to"
    with pytest.raises(CorpusError, match=only.format(2)):
        open_source(str(corpus))
    (corpus / "innocent.txt").unlink()
    for pattern in ("", "/*"):
        with pytest.raises(CorpusError, match=only.format(1)):
            open_source(f"{corpus}{pattern}")
    (corpus / "real").mkdir()
    (corpus / "real" / "c.txt").write_text("c")
    (corpus / "inside").symlink_to("real")
    caplog.clear()
    assert open_source(str(corpus)).names == ("real/c.txt",)
    assert "2 links" in caplog.text


@pytest.mark.parametrize("name", ["a.txt.zst", "a.jsonl", "A.JSONL.GZ", "a.parquet"])
def test_a_document_that_is_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A document that is too long is broken and the rest is read."""
    monkeypatch.setattr(sources, "_MOST_BYTES", 1000)
    monkeypatch.setattr(sources, "_READ_BYTES", 64)
    texts = ["short", "x" * 5000, "after"]
    if name == "a.parquet":
        pq.write_table(pa.table({"text": texts}), tmp_path / name)
    elif ".jsonl" in name.lower():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith(".GZ") else lines)
    else:
        texts = texts[1:2]
        (tmp_path / name).write_bytes(pa.compress(texts[0].encode(), "zstd", asbytes=True))
    source = open_source(str(tmp_path))
    found = [item for unit in source.units() for item in source.read(unit)]
    assert [item.text for item in found if isinstance(item, Document)] == [text for text in texts if len(text) < 1000]
    [broken] = [item for item in found if isinstance(item, Broken)]
    assert broken.reason == "longer than 1,000 bytes"
    assert len(broken.sample) == 200


def test_a_value_that_many_rows_share_is_in_memory_once(tmp_path: Path) -> None:
    rows, text = 2000, "y" * 2**20
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 2**20
    source = open_source(str(tmp_path))
    before = pa.total_allocated_bytes()
    first = next(iter(source.read(source.units()[0])))
    assert isinstance(first, Document)
    assert first.text == text
    assert pa.total_allocated_bytes() - before < 64 * 2**20


def test_a_source_is_another_when_a_file_changes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    before = open_source(str(tmp_path)).fingerprint()
    assert open_source(str(tmp_path)).fingerprint() == before
    (tmp_path / "a.txt").write_text("two!")
    assert open_source(str(tmp_path)).fingerprint() != before


def test_missing_and_empty_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="not exist"):
        open_source(str(tmp_path / "absent"))
    with pytest.raises(CorpusError, match="no files"):
        open_source(str(tmp_path))
    with pytest.raises(CorpusError, match="no files"):
        open_source(str(tmp_path / "*.txt"))


def test_bytes_that_are_not_utf8_become_replacement_characters(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"good \xff end")
    assert [document.text for document in open_source(str(tmp_path)).documents()] == ["good \ufffd end"]


def test_text_cannot_forge_an_end_of_text() -> None:
    [ids] = BPE.encode(["before <|endoftext|> after"])
    assert np.count_nonzero(ids == BPE.end_of_text) == 1
    assert BPE.decode(ids.tolist()) == "before <|endoftext|> after"


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=30), max_size=20), st.integers(1, 60))
@example(["", "", ""], len('{"text": ""}\n'))  # units that begin where a line does
def test_each_line_is_read_by_one_unit(texts: list[str], unit_bytes: int) -> None:
    folder = Folder(f"memory://lines-{uuid.uuid4().hex}")
    folder.write("a.jsonl", "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_UNIT_BYTES", unit_bytes)
        source = CorpusReader(folder, ("a.jsonl",))
        assert [document.text for document in source.documents()] == texts
        assert len(source.units()) == -(-folder.size("a.jsonl") // unit_bytes)
    folder.remove()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt.gz"])
def test_every_kind_of_file_gives_its_texts(tmp_path: Path, name: str) -> None:
    texts = ["one\ntwo", "drei \u00fc", "four"]
    table = pa.table({"body": texts, "id": [1, 2, 3]})
    if name.endswith(".parquet"):
        pq.write_table(table, tmp_path / name, row_group_size=2)
    else:
        lines = "\n".join(json.dumps(row) for row in table.to_pylist()) if "jsonl" in name else "".join(texts)
        with pa.output_stream(tmp_path / name, compression="detect" if "." in name[2:] else None) as out:
            out.write(lines.encode())
    source = open_source(str(tmp_path), field="body")
    found = [document.text for document in source.documents()]
    assert found == (texts if "txt" not in name else ["".join(texts)])
    if name.endswith(".parquet"):
        assert len(source.units()) == 2
        with pytest.raises(CorpusError, match=r"corpus\.field = 'text'.*body, id"):
            list(open_source(str(tmp_path)).documents())


def test_broken_records_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n{"text": \n\n{"body": 1}\n{"text": "bad \xff"}\n')
    source = open_source(str(tmp_path))
    [unit] = source.units()
    found = list(source.read(unit))
    assert [item.text for item in found if isinstance(item, Document)] == ["good", "bad \ufffd"]
    assert [(item.name, item.reason) for item in found if isinstance(item, Broken)] == [
        ("a.jsonl@17", "not JSON"),
        ("a.jsonl@28", "no text in 'text'"),
    ]


@pytest.mark.parametrize("name", ["c4-train.00000-of-01024.json.gz", "a.JSON"])
def test_json_lines_in_a_json_file_are_records(tmp_path: Path, name: str) -> None:
    lines = b'{"text": "one", "url": "a"}\n{"text": "two", "url": "b"}\n'
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    assert [document.text for document in open_source(str(tmp_path)).documents()] == ["one", "two"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "separated.txt"])
def test_a_byte_order_mark_is_no_part_of_the_first_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """At byte 0 only: anywhere else it is a character of the text."""
    monkeypatch.setattr(sources, "_UNIT_BYTES", 20)
    mark, texts = "\ufeff", ["first", "\ufeffsecond", "third"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    whole = "\n".join(lines) if "jsonl" in name else "|".join(texts)
    data = (mark + whole).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    source = open_source(str(tmp_path), separator="|" if name == "separated.txt" else "")
    found = [item for unit in source.units() for item in source.read(unit)]
    assert found[0].name in (f"{name}@0", name)
    assert [item.text for item in found if isinstance(item, Document)] == ([whole] if name == "a.txt" else texts)


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path: Path) -> None:
    lines = [r'{"text": "a \ud83d b"}', r'{"text": "\ud83e\udd86"}', r'{"text": "\udc00\ud800"}', r'{"\ud800": 1}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = open_source(str(tmp_path))
    *found, broken = source.read(source.units()[0])
    assert [item.text for item in found if isinstance(item, Document)] == ["a \ufffd b", "\U0001f986", "\ufffd\ufffd"]
    assert isinstance(broken, Broken)
    assert all(item.digest for item in found if isinstance(item, Document))


def test_a_line_that_is_nested_too_deeply_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + "[" * 200_000 + '\n{"text": "after"}\n')
    source = open_source(str(tmp_path))
    first, broken, last = source.read(source.units()[0])
    assert [first, last] == [Document("a.jsonl@0", "good"), Document("a.jsonl@200018", "after")]
    assert isinstance(broken, Broken)
    assert (broken.name, broken.reason) == ("a.jsonl@17", "nested too deeply")


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_strings_of_parquet_that_are_not_utf8_become_replacement_characters(tmp_path: Path, kind: pa.DataType) -> None:
    values = [b"good \xff end", b"fine \xc3\xbc", None]
    if pa.types.is_dictionary(kind):
        words = pa.array(values[:2], pa.binary()).view(pa.string())
        column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int32()), words)
    else:
        raw = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
        column = pa.array(values, raw[kind]).view(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    source = open_source(str(tmp_path))
    assert list(source.read(source.units()[0])) == [
        Document("a.parquet@0/0", "good \ufffd end"),
        Document("a.parquet@0/1", "fine \u00fc"),
        Broken("a.parquet@0/2", "no text", "None"),
    ]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst", "a.parquet"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, damage: str) -> None:
    if name == "a.parquet":
        pq.write_table(pa.table({"text": [uuid.uuid4().hex] * 500}), tmp_path / name)
    else:
        with pa.output_stream(tmp_path / name) as out:
            out.write(b"".join(b'{"text": "%s"}\n' % uuid.uuid4().hex.encode() for _ in range(500)))
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes({"cut": data[: len(data) // 2], "garbage": b"garbage" * 50, "empty": b""}[damage])
    if damage == "empty" and name != "a.parquet":
        assert not [found for found in open_source(str(tmp_path)).documents() if found.text]
        return
    with pytest.raises(CorpusError, match=rf"corpus\.source = .*{name}"):
        list(open_source(str(tmp_path)).documents())


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("cafe\u0301", {}, ("caf\u00e9", "")),
        ("cafe\u0301", {"normalization": "none"}, ("cafe\u0301", "")),
        (" \n", {}, ("", "empty")),
        ("ab", {"min_characters": 3}, ("", "short")),
        ("abcd", {"max_characters": 3}, ("", "long")),
        ("x \ufffd", {"broken_text": "drop"}, ("", "not UTF-8")),
        ("same line\n" * 9 + "other", {"max_repetition": 0.8}, ("", "repetitive")),
        ("one\ntwo\nthree", {"max_repetition": 0.0}, ("one\ntwo\nthree", "")),
        ("{}[]();a", {"max_symbols": 0.5}, ("", "symbols")),
        (
            "\u0928\u092e\u0938\u094d\u0924\u0947 12",
            {"max_symbols": 0.0},
            ("\u0928\u092e\u0938\u094d\u0924\u0947 12", ""),
        ),
    ],
)
def test_texts_are_normalised_or_dropped_for_a_reason(
    text: str, changes: dict[str, Any], expected: tuple[str, str]
) -> None:
    verdict = clean(text, CorpusConfig.model_validate(changes))
    assert (verdict.text, verdict.reason) == expected


def test_a_store_that_cannot_be_reached_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3 = fsspec.get_filesystem_class("s3")
    s3.clear_instance_cache()  # another test's connection, with its credentials
    try:
        with pytest.raises(CorpusError, match=r"AWS_ACCESS_KEY_ID"):
            open_source("s3://nowhere/texts/*.txt")
    finally:
        s3.clear_instance_cache()


def test_a_parquet_file_whose_footer_is_not_utf_8_is_named(tmp_path: Path) -> None:
    """One flipped bit in the footer: pyarrow then raises what is neither of its errors about bad data nor an OSError."""
    file = tmp_path / "it.parquet"
    pq.write_table(pa.table({"text": pa.array([1, 2], pa.int8())}), file, store_schema=False)
    data = file.read_bytes()
    refused = []
    for place in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data) - 8):
        file.write_bytes(data[:place] + bytes([data[place] ^ 0x80]) + data[place + 1 :])
        try:
            list(open_source(str(file)).documents())
        except CorpusError as error:
            refused.append(str(error))
    assert any("codec can't decode" in one for one in refused)
    assert [one for one in refused if "it.parquet" not in one] == []


def test_a_glob_on_a_store_takes_files_only() -> None:
    folder = Folder(f"memory://globs-{uuid.uuid4().hex}")
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt"):
        folder.write(name, name)
    assert open_source(f"{folder.url}/*").names == ("a.txt",)
    assert open_source(f"{folder.url}/**").names == ("a.txt", "sub/b.txt", "sub/deep/c.txt")
    with pytest.raises(CorpusError, match="no files"):
        open_source(f"{folder.url}/s*")
    folder.remove()


def test_folder_markers_are_skipped_and_odd_keys_named(s3: str) -> None:
    """Markers of folders are no files and keys that cannot be asked for are named."""
    fs = fsspec.filesystem("s3")
    for key in ("marked/", "marked/sub/", "marked/sub/a.txt", "control/a\x01b.txt"):
        fs.call_s3("put_object", Bucket="checkpoints", Key=key, Body=b"" if key.endswith("/") else b"text")
    for pattern in ("", "/**"):
        source = open_source(f"{s3}/marked{pattern}")
        assert source.names == ("sub/a.txt",)
        assert [document.text for document in source.documents()] == ["text"]
    for pattern in ("", "/*", "/a\x01b.txt"):
        with pytest.raises(CorpusError, match=r"control/a\\x01b\.txt'"):
            open_source(f"{s3}/control{pattern}")


@pytest.mark.parametrize(("ids", "most"), [([], 10), ([65, 66, 67, 68], 2)])
def test_records_of_token_ids_wait_for_few_others(monkeypatch: pytest.MonkeyPatch, ids: list[int], most: int) -> None:
    monkeypatch.setattr(documents, "_TOKENS_AT_ONCE", 10)
    taken: list[int] = []

    def records() -> Iterator[Tokens]:
        for number in range(100):
            taken.append(number)
            yield Tokens(f"a@{number}", np.array(ids, np.int64))

    found = documents.from_tokens(records(), "a", BYTES)
    next(found)
    assert len(taken) == most
    assert len(list(found)) == 99


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text"] * 2), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"corpus\.field = 'text'.* 2 columns .*a\.parquet"):
        list(open_source(str(tmp_path)).documents())
