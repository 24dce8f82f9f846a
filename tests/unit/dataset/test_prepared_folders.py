"""What a prepare says of a folder: files left out, records lost, and what it refuses before anything is sealed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared import prepare, small

from springtide.app.prepare import write_card
from springtide.cli.inspect import inspect_dataset
from springtide.dataset import open_dataset

TEXTS = [f"Document {number} of some length, and {number * 7919} is its number." for number in range(300)]


def of_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_files_left_out_are_named_beside_the_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "text" / "data"
    data.mkdir(parents=True)
    pq.write_table(pa.table({"text": TEXTS}), data / "train.parquet")
    for name in ("README.md", "_SUCCESS", ".gitattributes", *(f"docs/{number:02d}.md" for number in range(30))):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_text("words about the data")
    url = prepare(small(tmp_path / "data", tmp_path / "text", corpus__near_duplicates=False)).shards.dataset
    source = open_dataset(url)[0].source
    assert source["documents"] == len(TEXTS)
    assert (len(source["left_out"]), source["left_out"][-1]) == (21, "13 more")
    inspect_dataset(url, False, False)
    assert "left out, because they are no data: data/README.md, data/_SUCCESS, " in capsys.readouterr().out
    assert "data/_SUCCESS" in Path(write_card(url)).read_text()
