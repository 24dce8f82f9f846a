"""A Parquet file of many row groups: each is a unit, and the footer is read once."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from springtide.corpus import Document, open_source
from springtide.corpus.sources import CorpusReader, Unit

GROUPS = 50


def write(path: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=1)


def texts_of(source: CorpusReader, units: list[Unit]) -> list[str]:
    """Read the units as tasks do, each with a reader of its own."""
    found = []
    for unit in units:
        bare = pickle.loads(pickle.dumps(source.bare()))
        found += [one.text for one in bare.read(unit) if isinstance(one, Document)]
    return found


def test_the_footer_of_many_row_groups_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", texts := [f"text {number}" for number in range(GROUPS)])
    source = open_source(str(tmp_path))
    units = source.units()
    parsed: list[object] = []
    opened = pq.ParquetFile

    def open_file(file: Any, metadata: Any = None, **options: Any) -> Any:
        parsed.append(metadata)
        return opened(file, metadata=metadata, **options)

    monkeypatch.setattr(pq, "ParquetFile", open_file)
    assert len(units) == GROUPS
    assert texts_of(source, units) == texts
    before = len(parsed)
    assert None not in parsed[1:], "opened without the footer that is known"
    assert texts_of(source, units) == texts
    assert None not in parsed[before:]


def test_a_file_that_was_rewritten_has_another_footer(tmp_path: Path) -> None:
    for texts in (["one", "two", "three"], ["another", "file"], ["1"]):
        write(tmp_path / "a.parquet", texts)
        source = open_source(str(tmp_path))
        assert texts_of(source, source.units()) == texts
        assert [document.text for document in source.documents()] == texts
