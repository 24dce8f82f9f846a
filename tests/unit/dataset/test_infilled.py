"""A dataset that is reordered to fill in the middle."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from prepared import contents, prepare, small, write_corpus

from springtide.config.data import CorpusConfig
from springtide.dataset import open_dataset, parts
from springtide.errors import ConfigError
from springtide.shards import HELDOUT, TRAIN, SplitReader, ids_of, is_predicted
from springtide.storage import Folder

BEFORE, AFTER, BETWEEN = CorpusConfig().fim_tokens


def documents(url: str, split: str) -> tuple[list[str], np.ndarray]:
    """The documents of a split, special tokens spelled, and its rows."""
    manifest, vocabulary = open_dataset(url)
    rows = SplitReader(Folder(url), manifest, split).read(np.arange(manifest.splits[split].rows)).tokens
    line = ids_of(np.concatenate([rows[0][:1], rows[:, 1:].ravel()]))
    spelled = vocabulary.tokenizer.decode(line.tolist(), skip_special_tokens=False)
    return spelled.split("<|endoftext|>"), rows


def restored(text: str) -> str:
    found = re.fullmatch(
        f"{re.escape(BEFORE)}(.*){re.escape(AFTER)}(.*){re.escape(BETWEEN)}(.*)", text, flags=re.DOTALL
    )
    return found[1] + found[3] + found[2] if found else text


def test_training_text_is_reordered_and_held_out_text_is_not(tmp_path: Path) -> None:
    texts = write_corpus(tmp_path / "text", 120)
    changes = {"corpus__tokenizer": "bytes", "shards__sequence_length": 1500}
    plain = prepare(small(tmp_path / "plain", tmp_path / "text", **changes)).shards.dataset
    url = prepare(small(tmp_path / "data", tmp_path / "text", corpus__fim=0.5, **changes)).shards.dataset
    manifest, other = open_dataset(url)[0], open_dataset(plain)[0]
    assert manifest.source["dropped"] == other.source["dropped"]
    assert {name: split.documents for name, split in manifest.splits.items()} == {
        name: split.documents for name, split in other.splits.items()
    }
    changed = manifest.source["edits"]["fill in the middle: documents"]
    assert 35 < changed < 85
    added = manifest.splits[TRAIN].tokens - other.splits[TRAIN].tokens
    assert added % 3 == 0
    assert changed - 20 <= added // 3 <= changed  # up to 20 of them are duplicates
    assert manifest.splits[HELDOUT].tokens == other.splits[HELDOUT].tokens
    found, _ = documents(url, TRAIN)
    assert sum(BEFORE in text for text in found) > 30
    assert {restored(text) for text in found[:-1]} <= {*texts}
    assert all(BEFORE not in text for text in documents(url, HELDOUT)[0])


def test_parts_of_a_long_document_begin_with_begin_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a long document are documents with a begin of text."""
    texts = write_corpus(tmp_path / "text", 40)
    changes = {
        "corpus__tokenizer": "bytes",
        "corpus__fim": 0.5,
        "corpus__near_duplicates": False,
        "shards__sequence_length": 300,
        "shards__packing": "best_fit",
        "shards__mask_across_documents": True,
    }
    url = prepare(small(tmp_path / "data", tmp_path / "text", **changes)).shards.dataset
    manifest, vocabulary = open_dataset(url)
    rows = SplitReader(Folder(url), manifest, TRAIN).read(np.arange(manifest.splits[TRAIN].rows)).tokens
    before = vocabulary.id_of(BEFORE, "")
    places = np.argwhere(ids_of(rows) == before)
    assert len(places) > 40
    for row, place in places.tolist():
        if place:  # else a long part was cut
            assert ids_of(rows[row])[place - 1] == manifest.begin_of_text
            assert not is_predicted(rows[row])[place - 1]
            assert is_predicted(rows[row])[place]
    counted = np.where(is_predicted(rows)[:, 1:], vocabulary.byte_lengths()[ids_of(rows)[:, 1:]], 0).sum()
    assert counted == manifest.splits[TRAIN].num_bytes
    monkeypatch.setattr(parts, "_PART_BYTES", 5_000)
    again = prepare(small(tmp_path / "again", tmp_path / "text", **changes)).shards.dataset
    assert contents(again) == contents(url)
    assert len(texts) == 60


@pytest.mark.processes
def test_a_tokenizer_without_the_tokens_is_refused_before_the_parts(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", 20)
    first = prepare(small(tmp_path / "data", tmp_path / "text")).shards.dataset
    changes = {"corpus__tokenizer": f"{first}/tokenizer.json", "corpus__fim": 0.5}
    with pytest.raises(ConfigError, match=r"corpus\.fim_tokens = '<\|fim_prefix\|>'"):
        prepare(small(tmp_path / "data", tmp_path / "text", **changes))
