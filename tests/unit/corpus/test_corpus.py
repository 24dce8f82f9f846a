"""Documents and vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.corpus import Document, Vocabulary, open_source, open_vocabulary
from springtide.corpus.vocabulary import bytes_vocabulary, train_bpe
from springtide.dataset import split_of
from springtide.errors import ConfigError, CorpusError

BPE = train_bpe(["def one(two): return three\n" * 20, "class Four:\n    pass\n" * 20], 300)
BYTES = bytes_vocabulary()


@given(st.text(), st.sampled_from([BPE, BYTES]))
def test_text_comes_back_and_every_byte_is_accounted_for(text: str, vocabulary: Vocabulary) -> None:
    [ids] = vocabulary.encode([text])
    assert ids[-1] == vocabulary.end_of_text
    assert vocabulary.decode(ids.tolist()) == text
    assert vocabulary.byte_lengths()[ids].sum() == len(text.encode())


def test_a_byte_vocabulary_has_257_ids() -> None:
    assert BYTES.size == 257
    assert Vocabulary.from_json(BYTES.to_json()).size == 257


def test_a_vocabulary_survives_its_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(BPE.to_json())
    again = open_vocabulary(str(tmp_path / "tokenizer.json"), [], 0)
    assert again.tokenizer.get_vocab() == BPE.tokenizer.get_vocab()
    with pytest.raises(ConfigError, match="neither 'bpe' nor 'bytes' nor a file"):
        open_vocabulary("bqe", [], 300)


def test_sources_are_folders_files_and_globs(tmp_path: Path) -> None:
    for name in ("a.txt", "sub/b.txt", "sub/c.md", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert open_source(str(tmp_path)).names == ("a.txt", "sub/b.txt", "sub/c.md")
    assert open_source(str(tmp_path / "a.txt")).names == ("a.txt",)
    assert open_source(str(tmp_path / "**/*.txt")).names == ("a.txt", "sub/b.txt")
    assert open_source(str(tmp_path), max_documents=2).names == ("a.txt", "sub/b.txt")
    assert [document.text for document in open_source(str(tmp_path / "sub")).documents()] == ["sub/b.txt", "sub/c.md"]


def test_a_source_is_another_when_a_file_changes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    before = open_source(str(tmp_path)).fingerprint()
    assert open_source(str(tmp_path)).fingerprint() == before
    (tmp_path / "a.txt").write_text("two!")
    assert open_source(str(tmp_path)).fingerprint() != before


def test_missing_and_empty_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="does not exist; check the path"):
        open_source(str(tmp_path / "absent"))
    with pytest.raises(CorpusError, match="holds no files"):
        open_source(str(tmp_path))
    with pytest.raises(CorpusError, match="holds no files"):
        open_source(str(tmp_path / "*.txt"))


def test_bytes_that_are_not_utf8_become_replacement_characters(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"good \xff end")
    assert [document.text for document in open_source(str(tmp_path)).documents()] == ["good \ufffd end"]


def test_a_document_is_held_out_for_its_text_alone() -> None:
    documents = [Document(f"name-{number}", f"text {number}") for number in range(2000)]
    held_out = [split_of(document, 0.1) == "heldout" for document in documents]
    assert 150 < sum(held_out) < 250
    assert held_out == [split_of(Document("elsewhere", document.text), 0.1) == "heldout" for document in documents]
