"""Formats of records besides JSON lines and Parquet: JSON arrays, CSV, Arrow as save_to_disk writes it, WebDataset tars, xz."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from springtide.corpus import Broken, Document, json_records, open_source, sources, tables
from springtide.corpus.json_records import split_values
from springtide.errors import CorpusError

TEXTS = ['plain, "quoted"', "two\nlines", "", "drei \u00fc \\", "[{\u2028}]"]
RECORDS = [{"id": number, "text": text, "more": {"a": ["]", text]}} for number, text in enumerate(TEXTS)]


def found_in(path: Path, field: str = "text", is_chat: bool = False) -> list[Document | Broken]:
    source = open_source(str(path), field=field, is_chat=is_chat)
    return [one for unit in source.units() for one in source.read(unit)]


def texts_in(path: Path, field: str = "text") -> list[str]:
    return [one.text for one in found_in(path, field) if isinstance(one, Document)]


def reasons_in(path: Path, field: str = "text") -> list[str]:
    return [one.reason for one in found_in(path, field) if isinstance(one, Broken)]


def csv_bytes(rows: list[list[Any]], **options: Any) -> bytes:
    out = io.StringIO()
    csv.writer(out, **options).writerows(rows)
    return out.getvalue().encode()


def arrow_bytes(table: pa.Table, is_file: bool = False, **options: Any) -> bytes:
    out = io.BytesIO()
    opened = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with opened(out, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=2)
    return out.getvalue()


def tar_bytes(members: dict[str, bytes | str], form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar; a text is the target of a link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(data, str):
                info.type, info.linkname = tarfile.SYMTYPE, data
            else:
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data) if isinstance(data, bytes) else None)
    return out.getvalue()


TABLE = pa.Table.from_pylist(RECORDS)
ROWS = [["id", "text"], *([number, text] for number, text in enumerate(TEXTS))]
FORMS = {
    "array.json": json.dumps(RECORDS).encode(),
    "pretty.json": b"\xef\xbb\xbf" + json.dumps(RECORDS, indent=2, ensure_ascii=False).encode(),
    "lines.json": "\n".join(map(json.dumps, RECORDS)).encode(),
    "objects.json": "\n".join(json.dumps(one, indent=1) for one in RECORDS).encode(),
    "a.csv": csv_bytes(ROWS),
    "mark.CSV": b"\xef\xbb\xbf" + csv_bytes(ROWS, quoting=csv.QUOTE_ALL, lineterminator="\n"),
    "a.tsv": csv_bytes(ROWS, delimiter="\t"),
    "stream.arrow": arrow_bytes(TABLE),
    "file.arrow": arrow_bytes(TABLE, is_file=True),
    "txt.tar": tar_bytes({f"d/{number}.txt": text.encode() for number, text in enumerate(TEXTS)}),
    "json.tar": tar_bytes({f"{number}.json": json.dumps(record).encode() for number, record in enumerate(RECORDS)}),
}


@pytest.mark.parametrize("end", ["", ".gz", ".xz"])
@pytest.mark.parametrize("name", FORMS)
def test_every_record_is_a_document(tmp_path: Path, name: str, end: str) -> None:
    pack: Callable[[bytes], bytes] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[end]
    (tmp_path / f"{name}{end}").write_bytes(pack(FORMS[name]))
    found = found_in(tmp_path)
    assert [one.text for one in found if isinstance(one, Document)] == TEXTS
    assert all(one.name.startswith(f"{name}{end}@") for one in found)
    assert reasons_in(tmp_path) == []


def test_xz_is_read_as_the_others_are(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(1000)).encode()
    streams = lzma.compress(lines[:9000]) + bytes(8) + lzma.compress(lines[9000:]) + bytes(4)
    (tmp_path / "a.jsonl.xz").write_bytes(streams)
    assert texts_in(tmp_path) == [f"text {number}" for number in range(1000)]
    for damaged in (streams[:700], streams[:300] + b"junk" + streams[304:], lines):
        (tmp_path / "a.jsonl.xz").write_bytes(damaged)
        with pytest.raises(CorpusError, match=r"a\.jsonl\.xz': cannot be read \(.*xz"):
            found_in(tmp_path)


def test_a_decoder_of_xz_gets_no_more_memory_than_it_may(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**28, "mode": lzma.MODE_FAST, "mf": lzma.MF_HC3, "depth": 1}]
    packed = bytearray(lzma.compress(b"text\n", filters=[{**filters[0], "dict_size": 4096}]))
    at = packed.index(b"\x21\x01") + 2  # the size of the dictionary, in the header of the block
    packed[at] = 38  # 2 GiB
    header = packed[12 : 12 + (packed[12] + 1) * 4 - 4]
    packed[12 + len(header) : 16 + len(header)] = zlib.crc32(bytes(header)).to_bytes(4, "little")
    (tmp_path / "a.txt.xz").write_bytes(packed)
    with pytest.raises(CorpusError, match=r"a\.txt\.xz': cannot be read \(xz: Memory usage limit"):
        found_in(tmp_path)


JSON = st.recursive(
    st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(JSON, st.integers(1, 9))
@example(['\\"', "\\\\", {"]": "[,"}], 1)
def test_values_are_split_where_json_ends_them(value: Any, size: int) -> None:
    """At any size of what is read at a time, indented or not, of an array or of objects that follow one another."""
    records = [value, {"a": value}, [], {}, "x", 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_records, "_READ_BYTES", size)
        for indent in (None, 1):
            text = json.dumps(records, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
            found = list(split_values(io.BytesIO(text), 2**20))
            assert [json.loads(one) for _, one in found] == records
            assert all(text[place:].startswith(one) for place, one in found)
            objects = [{"a": record} for record in records]
            text = "\n".join(json.dumps(one, indent=indent) for one in objects).encode()
            assert [json.loads(one) for _, one in split_values(io.BytesIO(text), 2**20)] == objects


def test_an_array_of_any_size_takes_little_memory() -> None:
    """Of a long value no more is held than a document may have."""

    class Long(io.RawIOBase):
        """An array of a short text and one of 200 MiB."""

        parts = iter([b'[{"text": "a"}, {"text": "', *[b"x" * 2**20] * 200, b'"}, {"text": "b"}]'])

        def read(self, size: int = -1) -> bytes:
            return next(self.parts, b"")

    short, long, last = (value for _, value in split_values(Long(), 2**20))
    assert (short, last) == (b'{"text": "a"}', b'{"text": "b"}')
    assert len(long) == 2**20 + 1


@pytest.mark.parametrize(
    ("data", "texts", "reasons"),
    [
        (b'[{"text": "a"}, {"text": ', ["a"], ["not JSON"]),
        (b'[{"text": "a"},', ["a"], ["not JSON"]),
        (b'[{"text": "a"} {"text": "b"}]', [], ["not JSON"]),
        (b"[1, null, {}]", [], ["no text in 'text'"] * 3),
        (b'{"data": [{"text": "a"}]}', [], ["no text in 'text'"]),
        (b'{"text": {"0": "a", "1": "b"}}', [], ["no text in 'text'"]),
        (b'{"text": "a"} junk {"text": "b"}', ["a", "b"], ["not JSON"]),
        (b"}]", [], ["not JSON"]),
        (b"words", [], ["not JSON"]),
        (b"[" * 100_000, [], ["nested too deeply"]),
        (b"  \n", [], []),
        (b"[]", [], []),
    ],
)
def test_broken_json_is_counted_and_the_rest_is_read(
    tmp_path: Path, data: bytes, texts: list[str], reasons: list[str]
) -> None:
    (tmp_path / "a.json").write_bytes(data)
    assert (texts_in(tmp_path), reasons_in(tmp_path)) == (texts, reasons)


@pytest.mark.parametrize("name", ["long.json", "long.csv", "long.tar"])
def test_a_document_has_a_limit_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sources, "_MOST_BYTES", 1000)
    texts = ["short", "x" * 5000, "after"]
    data = {
        "long.json": json.dumps([{"text": text} for text in texts]).encode(),
        "long.csv": csv_bytes([["text"], *([text] for text in texts)]),
        "long.tar": tar_bytes({f"{number}.txt": text.encode() for number, text in enumerate(texts)}),
    }[name]
    (tmp_path / name).write_bytes(data)
    if name == "long.csv":  # what follows may be in quotes
        with pytest.raises(
            CorpusError, match=r"long\.csv': the row at byte 13 is longer than 1,000 bytes; close its quotes"
        ):
            found_in(tmp_path)
        return
    assert texts_in(tmp_path) == ["short", "after"]
    assert reasons_in(tmp_path) == ["longer than 1,000 bytes"]


def test_json_beside_text_is_text_as_source_code_is(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "README.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "package.json").write_text('{"name": "x"}')
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "c.py").write_text("c.py")
    assert texts_in(tmp_path) == ["README.md", "a.py", "b.py", "c.py", '{"name": "x"}', "a,b\n"]


def test_a_file_that_was_text_makes_another_source(tmp_path: Path) -> None:
    """A dataset that an earlier version made of such files is not taken for one of today's."""
    (tmp_path / "a.json").write_text("[]")
    now = open_source(str(tmp_path))
    as_text = sources.CorpusReader(now.folder, now.names, seen=now.seen, is_code=True)
    assert now.fingerprint() != as_text.fingerprint()


def test_a_table_without_the_field_names_its_columns(tmp_path: Path) -> None:
    for name, data in (("a.csv", csv_bytes(ROWS)), ("a.arrow", arrow_bytes(TABLE))):
        (tmp_path / name).write_bytes(data)
        columns = "id, text" if name == "a.csv" else r"id, text, more\.a"
        with pytest.raises(
            CorpusError, match=rf"corpus\.field = 'body': is not a column of .*{name}; choose one of {columns}"
        ):
            found_in(tmp_path / name, "body")
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(CorpusError, match=r"corpus\.field = 'text': is the name of 2 columns of .*a\.csv"):
        found_in(tmp_path / "a.csv")


def test_rows_of_a_table_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,a\n2\n3,"b" c\n4,d,e\n\n5,"f\ng"\n')
    other = "a row with another number of cells than the first"
    assert texts_in(tmp_path) == ["a", "f\ng"]
    assert reasons_in(tmp_path) == [other, "not CSV (',' expected after '\"')", other]


def test_a_table_of_very_many_cells_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MOST_CELLS", 100)
    (tmp_path / "a.csv").write_text("text" + "," * 100 + "\n")
    with pytest.raises(CorpusError, match=r"a\.csv': the row at byte 0 has more than 100 cells"):
        found_in(tmp_path)


def save_to_disk(folder: Path, texts: list[str], shards: int = 2) -> None:
    """Write what Dataset.save_to_disk of the datasets library writes."""
    folder.mkdir(exist_ok=True)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(arrow_bytes(pa.table({"text": texts[number::shards]})))
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": None})
    )
    (folder / "dataset_info.json").write_text('{"features": {"text": {"dtype": "string"}}}')


def test_a_folder_of_save_to_disk_is_its_data(tmp_path: Path) -> None:
    save_to_disk(tmp_path, TEXTS)
    (tmp_path / "cache-0123.arrow").write_bytes(arrow_bytes(pa.table({"text": ["of a later map"]})))
    assert sorted(texts_in(tmp_path)) == sorted(TEXTS)
    assert open_source(str(tmp_path)).left_out == ("dataset_info.json", "state.json", "cache-0123.arrow")


def test_of_several_splits_train_is_read(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_to_disk(tmp_path / split, [f"{split} {number}" for number in range(3)])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert sorted(texts_in(tmp_path)) == ["train 0", "train 1", "train 2"]
    assert "test/data-00000-of-00002.arrow" in open_source(str(tmp_path)).left_out
    assert sorted(texts_in(tmp_path / "test")) == ["test 0", "test 1", "test 2"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["a", "test"]}')
    with pytest.raises(CorpusError, match=r"dataset_dict\.json': lists the splits a, test, and no train; point"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ("[]", "is not what save_to_disk"),
        ("{}", "is not what save_to_disk"),
        (
            '{"_data_files": [{"filename": "../../secret.arrow"}]}',
            r"lists \.\./\.\./secret\.arrow, which is not in the source",
        ),
        ('{"_data_files": [{"filename": null}]}', "lists None, which is not"),
        ('{"_data_files": [], "_indices_files": [{}]}', "chooses rows by an index"),
        ("{", "is not JSON"),
    ],
)
def test_a_damaged_list_of_arrow_files_is_refused(tmp_path: Path, state: str, problem: str) -> None:
    save_to_disk(tmp_path / "set", TEXTS)
    (tmp_path / "set" / "state.json").write_text(state)
    with pytest.raises(ValueError, match=rf"state\.json'?: {problem}"):
        open_source(str(tmp_path))


def test_a_hostile_arrow_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = arrow_bytes(pa.table({"text": ["a" * 100, "b" * 100]}))
    offsets = good.index(b"\0\0\0\0" + (100).to_bytes(4, "little") + (200).to_bytes(4, "little")) + 8
    words = pa.table({"text": pa.array(["a", "b"]).dictionary_encode()})
    cases = {
        "cannot be read": good[:offsets] + (2**30).to_bytes(4, "little") + good[offsets + 4 :],
        "compressed inside": arrow_bytes(pa.table({"text": ["a" * 1000] * 9}), compression="zstd"),
        "without dictionaries": arrow_bytes(words),
        "cut": good[:-100],
        "schema": b"\xff\xff\xff\xff\0\0\0\0",
        "part of": good,
    }
    for problem, data in cases.items():
        (tmp_path / "a.arrow").write_bytes(data)
        if problem == "part of":
            monkeypatch.setattr(tables, "MOST_BATCH_BYTES", 150)
        told = r"a\.arrow': cannot be read " if problem == "cut" else rf"a\.arrow': .*{problem}"
        with pytest.raises(CorpusError, match=told):
            found_in(tmp_path)


def test_a_sample_of_a_tar_is_one_document(tmp_path: Path) -> None:
    """The caption of an image, not its metadata, and nothing of links or of names that lead elsewhere."""
    members: dict[str, bytes | str] = {
        "a/0.json": b'{"text": "metadata"}',
        "a/0.jpg": b"\xff\xd8" * 600,
        "a/0.txt": b"a caption",
        "a/1.cls": b"3",
        "a/2.JSON": b'{"text": "of a record"}',
        "../../etc/3.txt": b"three",
        "link.txt": "/etc/passwd",
        f"{'deep/' * 60}4.txt": b"four",
        "5.txt": bytes(100),
        "6.seg.txt": b"another member",
    }
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        (tmp_path / "a.tar").write_bytes(tar_bytes(members, form))
        assert texts_in(tmp_path) == ["a caption", "of a record", "three", "four"]
        without = "a sample without a .text or .txt or .json"
        assert reasons_in(tmp_path) == [without, "no text", without]
        assert texts_in(tmp_path, "seg.txt") == ["a caption", "three", "four", "another member"]


def test_a_damaged_tar_is_refused_by_name(tmp_path: Path) -> None:
    good = tar_bytes({"0.txt": b"text" * 300, "1.txt": b"more"})
    long = tar_bytes({"x" * 300 + ".txt": b"a"}, tarfile.GNU_FORMAT)
    wrong = bytearray(long)
    wrong[124:135] = b"77777777777"
    wrong[148:156] = b"%06o\0 " % (sum(wrong[:148]) + 8 * 32 + sum(wrong[156:512]))
    for data, problem in ((good[:1000], "cut"), (good[:512] + good[600:], "tar header"), (wrong, "more than 65,536")):
        (tmp_path / "a.tar").write_bytes(data)
        with pytest.raises(CorpusError, match=rf"a\.tar': cannot be read \(.*{problem}"):
            found_in(tmp_path)


def test_bytes_of_parquet_are_read_where_they_are_text(tmp_path: Path) -> None:
    column = pa.array(
        [b"one", "drei \u00fc".encode(), os.urandom(500), b"\xff\xd8\xff\xe0" + bytes(100), None], pa.binary()
    )
    for name, typed in (("a", column), ("b", column.dictionary_encode())):
        pq.write_table(pa.table({"text": typed}), tmp_path / f"{name}.parquet")
        assert texts_in(tmp_path / f"{name}.parquet") == ["one", "drei \u00fc"]
        assert reasons_in(tmp_path / f"{name}.parquet") == ["no text"] * 3


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "a.json"])
def test_text_in_a_struct_is_named_with_a_dot(tmp_path: Path, name: str) -> None:
    records = [{"doc": {"body": "one", "n": 1}}, {"doc": {"body": "two", "n": 2}}, {"doc": None}]
    table = pa.Table.from_pylist(records)
    if name.endswith(".parquet"):
        pq.write_table(table, tmp_path / name)
    else:
        lines = "\n".join(map(json.dumps, records)).encode()
        (tmp_path / name).write_bytes(arrow_bytes(table) if name.endswith(".arrow") else lines)
    assert texts_in(tmp_path, "doc.body") == ["one", "two"]
    assert len(reasons_in(tmp_path, "doc.body")) == 1
    if "json" not in name:
        with pytest.raises(
            CorpusError, match=r"corpus\.field = 'doc': is a struct .*; choose one of doc\.body, doc\.n"
        ):
            found_in(tmp_path, "doc")
        with pytest.raises(
            CorpusError, match=r"corpus\.field = 'doc\.x': is not a column of .*; choose one of doc\.body"
        ):
            found_in(tmp_path, "doc.x")


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.arrow", "a.tar"])
def test_chats_are_read_from_every_format(tmp_path: Path, name: str) -> None:
    records = [{"prompt": f"question {number}", "completion": f"answer {number}"} for number in range(3)]
    data = {
        "a.json": json.dumps(records, indent=1).encode(),
        "a.csv": csv_bytes([list(records[0]), *(list(one.values()) for one in records)]),
        "a.arrow": arrow_bytes(pa.Table.from_pylist(records)),
        "a.tar": tar_bytes({f"{number}.json": json.dumps(one).encode() for number, one in enumerate(records)}),
    }[name]
    (tmp_path / name).write_bytes(data)
    found = found_in(tmp_path, is_chat=True)
    assert [one.turns[-1].content for one in found if isinstance(one, Document)] == ["answer 0", "answer 1", "answer 2"]
    (tmp_path / name).write_bytes(data.replace(b"prompt", b"prompx"))
    [bad, *_] = [one for one in found_in(tmp_path, is_chat=True) if isinstance(one, Broken)]
    assert bad.sample.startswith("holds no chat")
    places = {"a.json": "line 2", "a.csv": "line 2", "a.arrow": "batch 0, row 0", "a.tar": "byte 0"}
    assert open_source(str(tmp_path), is_chat=True).line_of(bad.name).endswith(f"{name}, {places[name]}")
