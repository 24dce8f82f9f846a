"""Text files that hold several documents."""

from __future__ import annotations

import gzip
import uuid
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prepared import prepare
from pydantic import ValidationError

from springtide import config as configs
from springtide.config.data import BLANK_LINE, CorpusConfig
from springtide.corpus import Broken, CorpusReader, Document, open_source, sources
from springtide.dataset import open_dataset
from springtide.storage import Folder

END = "<|endoftext|>"


def read(folder: Folder, name: str, separator: str) -> list[str]:
    reader = CorpusReader(folder, (name,), separator=separator)
    return [found.text for unit in reader.units() for found in reader.read(unit) if isinstance(found, Document)]


WORDS = st.text("ab <|>\u00fc", min_size=1, max_size=9)


@given(
    st.lists(st.lists(WORDS, min_size=1, max_size=3), max_size=12),
    st.lists(st.sampled_from([END, f"\n{END}\n", f"{END}\r\n", f"{END}{END}"]), min_size=12, max_size=12),
    st.integers(1, 60),
    st.integers(1, 9),
)
@example([["a"], ["b"]], [END] * 12, 1, 1)
@settings(max_examples=50)
def test_each_document_between_separators_is_read_once(
    texts: list[list[str]], marks: list[str], unit_bytes: int, read_bytes: int
) -> None:
    documents = ["\n".join(lines) for lines in texts]
    folder = Folder(f"memory://separated-{uuid.uuid4().hex}")
    folder.write("a.txt", "".join(text + mark for text, mark in zip(documents, marks, strict=False)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_UNIT_BYTES", unit_bytes)
        patch.setattr(sources, "_READ_BYTES", read_bytes)
        assert read(folder, "a.txt", END) == documents
    folder.remove()


@given(
    st.lists(st.lists(WORDS.filter(str.strip), min_size=1, max_size=3), max_size=12),
    st.lists(st.sampled_from(["\n\n", "\n \t\n", "\r\n\r\n", "\n\n\n\n"]), min_size=12, max_size=12),
    st.integers(1, 60),
    st.integers(4, 9),  # a blank line is not cut
)
@example([["abcd"], ["b"]], ["\n\n"] * 12, 60, 4)
@example([["abcd", "e"], ["b"]], ["\n\n"] * 12, 60, 4)
@settings(max_examples=50)
def test_each_paragraph_is_read_once(
    texts: list[list[str]], marks: list[str], unit_bytes: int, read_bytes: int
) -> None:
    documents = ["\n".join(lines) for lines in texts]
    folder = Folder(f"memory://paragraphs-{uuid.uuid4().hex}")
    folder.write("a.txt", "".join(text + mark for text, mark in zip(documents, marks, strict=False)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_UNIT_BYTES", unit_bytes)
        patch.setattr(sources, "_READ_BYTES", read_bytes)
        assert read(folder, "a.txt", BLANK_LINE) == documents
    folder.remove()


def test_a_compressed_file_is_separated_too_and_the_end_of_a_file_ends_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(f"one{END}two".encode()))
    (tmp_path / "b.txt").write_text(f"three\n{END}\n\n")
    documents = list(open_source(str(tmp_path), separator=END).documents())
    assert [document.text for document in documents] == ["one", "two", "three"]
    assert documents[1].name == "a.txt.gz@0"


def test_a_document_that_is_too_long_is_told_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_MOST_BYTES", 100)
    (tmp_path / "a.txt").write_text(f"{'x' * 5000}{END}after")
    reader = open_source(str(tmp_path / "a.txt"), separator=END)
    broken, after = (found for unit in reader.units() for found in reader.read(unit))
    assert isinstance(broken, Broken)
    assert broken.reason == "longer than 100 bytes"
    assert isinstance(after, Document)
    assert after.text == "after"


def test_the_documents_of_one_file_become_rows_of_both_splits(tmp_path: Path) -> None:
    (tmp_path / "stories.txt").write_text(f"\n{END}\n".join(f"story {number} of many " * 9 for number in range(60)))
    config = configs.recipes.tiny().override(
        {
            "corpus.source": str(tmp_path / "stories.txt"),
            "corpus.separator": END,
            "corpus.near_duplicates": False,
            "shards.heldout_fraction": 0.2,
            "shards.root": str(tmp_path / "data"),
        }
    )
    manifest, _ = open_dataset(prepare(config).shards.dataset)
    assert manifest.source["documents"] == 60
    assert min(split.documents for split in manifest.splits.values()) > 3


def test_a_separator_is_one_line() -> None:
    with pytest.raises(ValidationError, match="separator"):
        CorpusConfig(separator="\n\n")
