"""Folders as people have them: what is no data beside data, odd names, and content that is not what a name says."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from springtide.corpus import changed_files, open_source
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
