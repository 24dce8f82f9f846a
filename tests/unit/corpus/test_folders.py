"""Folders as people have them: what is no data beside data, odd names, and content that is not what a name says."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.corpus import changed_files, open_source, open_tokenizer
from springtide.corpus.file_kinds import not_text
from springtide.errors import CorpusError

NO_DATA = (
    *("README.md", "LICENSE", "data/_SUCCESS", "dataset_infos.json", "dataset_info.json", "docs/card.md"),
    *("readme_zh.txt", "data/train.parquet.md5"),
)
HIDDEN = (".gitattributes", ".git/config", ".git/objects/ab", "data/.cache/x.txt")


ODD = ("v[1]", "x [2]", "a+b", "#1", "100%", "50%20", "who?", "st*r", "[!a]", "umlaut \u00fc")


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("words about the data")


def write_records(path: Path, number: int = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [f"text {one}" for one in range(number)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.mark.parametrize("pattern", ["", "/**/*", "/**"])
@pytest.mark.parametrize("data", ["data/train.parquet", "data/train.jsonl"])
def test_files_that_are_no_data_are_left_out(tmp_path: Path, data: str, pattern: str) -> None:
    write(tmp_path, *NO_DATA, *HIDDEN)
    write_records(tmp_path / data)
    source = open_source(f"{tmp_path}{pattern}")
    assert source.names == (data,)
    assert {*source.left_out} >= {*NO_DATA}
    assert {*source.left_out} - {*NO_DATA} <= {".gitattributes", ".git", "data/.cache"}
    assert [document.text for document in source.documents()] == ["text 0", "text 1", "text 2"]


def test_a_folder_of_text_alone_is_read_whole(tmp_path: Path) -> None:
    names = ("LICENSE", "README.md", "docs/card.md", "notes.txt")
    write(tmp_path, *names)
    source = open_source(str(tmp_path))
    assert (source.names, source.left_out) == (names, ())


def test_records_named_like_documentation_are_data(tmp_path: Path) -> None:
    for name in ("license.jsonl", "readme.parquet"):
        write_records(tmp_path / name)
    write(tmp_path, "README.md", "more.txt")
    assert open_source(str(tmp_path)).names == ("license.jsonl", "more.txt", "readme.parquet")
    assert open_source(str(tmp_path / "README.md")).names == ("README.md",)
    assert open_source(str(tmp_path), max_files=1).left_out == ("README.md",)


@pytest.mark.parametrize("name", ODD)
def test_what_exists_is_no_pattern(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "other.txt").write_text("matches v[1]")
    folder = tmp_path / name
    (folder / "sub").mkdir(parents=True)
    for file in (folder / f"{name}.txt", folder / "sub" / f"{name}.txt"):
        file.write_text("mine")
    assert open_source(str(folder)).names == tuple(sorted((f"{name}.txt", f"sub/{name}.txt")))
    for source in (folder / f"{name}.txt", f"{folder}/*.txt"):
        assert [document.text for document in open_source(str(source)).documents()] == ["mine"]
    assert open_source(f"{folder}/**/*.txt").names == tuple(sorted((f"{name}.txt", f"sub/{name}.txt")))
    assert open_source(f"{tmp_path}/{name}/s*/*").names == (f"sub/{name}.txt",)
    with pytest.raises(CorpusError, match="does not exist"):
        open_source(f"{folder}/missing.txt")
    assert changed_files(f"{folder}/*", open_source(f"{folder}/*").seen) == []
    monkeypatch.chdir(folder)
    assert open_source("*.txt").names == (f"{name}.txt",)


def test_a_pattern_that_names_nothing_literally_is_one(tmp_path: Path) -> None:
    for name in ("a1.txt", "a2.txt", "b1.txt"):
        (tmp_path / name).write_text(name)
    assert open_source(f"{tmp_path}/a[12].txt").names == ("a1.txt", "a2.txt")
    assert open_source(f"{tmp_path}/?1.txt").names == ("a1.txt", "b1.txt")


def test_names_on_s3_are_no_patterns_either(s3: str) -> None:
    fs = fsspec.filesystem("s3")
    for name in ODD:
        key = f"odd/{name}/sub/{name}.txt"
        fs.call_s3("put_object", Bucket="checkpoints", Key=key, Body=b"mine")
    for name in ODD:
        for source in (f"{s3}/odd/{name}", f"{s3}/odd/{name}/**", f"{s3}/odd/{name}/sub/{name}.txt"):
            assert [document.text for document in open_source(source).documents()] == ["mine"], source


LINES = "".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(40)).encode()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


def packed(kind: str) -> bytes:
    out = io.BytesIO()
    table = pa.table({"text": ["text"]})
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("a.jsonl", LINES)
    elif kind == "tar":
        with tarfile.open(fileobj=out, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("a.jsonl"))
    elif kind == "parquet":
        pq.write_table(table, out)
    else:
        opened = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with opened(out, table.schema) as writer:
            writer.write_table(table)
    return out.getvalue()


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "notes", "a.jsonl.gz"])
@pytest.mark.parametrize(
    ("data", "problem", "remedy"),
    [
        (gzip.compress(LINES), "begins as a gzip file", r"name it {}\.gz"),
        (lzma.compress(LINES), "begins as an xz file", r"name it {}\.xz"),
        (bz2.compress(LINES), "begins as a bzip2 file", r"name it {}\.bz2"),
        (bytes(pa.compress(LINES, "zstd", asbytes=True)), "begins as a Zstandard file", r"name it {}\.zst"),
        (packed("zip"), "is a zip archive", "unpack it"),
        (packed("tar"), "is a tar archive", r"name it .*\.tar"),
        (packed("parquet"), "is Parquet", r"name it .*\.parquet"),
        (packed("stream"), "is Arrow", r"name it .*\.arrow"),
        (packed("file"), "is Arrow", r"name it .*\.arrow"),
        (b"%PDF-1.7\n" + bytes(100), "is a PDF", "extract its text"),
        (POINTER, "is a Git LFS pointer", "git lfs pull"),
        (LINES.decode().encode("utf-16"), "is UTF-16", "iconv -f UTF-16"),
        (LINES.decode().encode("utf-32"), "is UTF-32", "iconv -f UTF-32"),
        (LINES.decode().encode("utf-16-le"), "is not text in UTF-8", "iconv"),
        ("Привет, мир. ".encode("koi8-r") * 20, "is not text in UTF-8", "iconv"),
        (bytes(500), "is not text in UTF-8: 500 of its first 500", "glob"),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_name(
    tmp_path: Path, name: str, data: bytes, problem: str, remedy: str
) -> None:
    """Its content decides, also inside of gzip, whatever it is called."""
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    if name.endswith(".gz"):
        problem, remedy = problem.replace("begins as a gzip file", "is not text"), ""
    told = rf"corpus\.source = '.*{name}': {problem}.*{remedy.format(name)}"
    for separator in ("", "blank_line"):
        with pytest.raises(CorpusError, match=told):
            list(open_source(str(tmp_path), separator=separator).documents())


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "tokens.bin"])
def test_a_pointer_of_git_lfs_is_told_as_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(POINTER)
    source = open_source(str(tmp_path))
    with pytest.raises(CorpusError, match=rf"{name}': is a Git LFS pointer, not the file itself; run: git lfs pull"):
        [list(source.read(unit, open_tokenizer("bytes", (), 0))) for unit in source.units()]


def test_single_bytes_that_are_no_utf_8_are_text(tmp_path: Path) -> None:
    latin = "Les élèves sont déjà passés dans la forêt de grands arbres.\n".encode("latin-1") * 20
    (tmp_path / "a.txt").write_bytes(latin)
    (tmp_path / "b.txt").write_bytes(b"short \xff\0")
    assert [document.text.count("\ufffd") for document in open_source(str(tmp_path)).documents()] == [120, 1]


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1))
def test_all_of_unicode_but_control_characters_is_text(text: str) -> None:
    """A character that the sample cuts is no fault."""
    assert not_text(("x" + text * 4096).encode()[:4096], "a.txt") is None
