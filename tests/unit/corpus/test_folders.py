"""Folders as people have them: what is no data beside data, odd names, and content that is not what a name says."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from springtide.corpus import open_source

NO_DATA = (
    *("README.md", "LICENSE", "data/_SUCCESS", "dataset_infos.json", "dataset_info.json", "docs/card.md"),
    *("readme_zh.txt", "data/train.parquet.md5"),
)
HIDDEN = (".gitattributes", ".git/config", ".git/objects/ab", "data/.cache/x.txt")


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
