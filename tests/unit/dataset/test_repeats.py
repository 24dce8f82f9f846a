"""Lines and paragraphs that occurred before in the corpus are removed, whoever prepares it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared import contents, prepare, small

from springtide.corpus import sources, without
from springtide.corpus.pieces import pieces
from springtide.dataset import open_dataset, repeats
from springtide.shards import SplitReader
from springtide.storage import Folder

FOOTER = "All rights reserved by the publisher of this page, whoever that may be."


def _sentence(rng: random.Random) -> str:
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(3, 9))) for _ in range(12)) + "."


def _write(folder: Path) -> list[str]:
    rng = random.Random(0)
    folder.mkdir()
    texts = [f"{_sentence(rng)}\n{_sentence(rng)}\n{FOOTER}\nshort" for _ in range(40)]
    texts += [f"{FOOTER}\n{FOOTER}", f"{_sentence(rng)}\n\n{texts[3]}"]
    for number, text in enumerate(texts):
        (folder / f"{number:02d}.txt").write_text(text)
    return texts


def _texts(url: str) -> str:
    manifest, vocabulary = open_dataset(url)
    found = []
    for name, split in manifest.splits.items():
        rows = SplitReader(Folder(url), manifest, name).read(np.arange(split.rows)).tokens
        found.append(vocabulary.decode(rows[:, 1:].ravel().tolist()))
    return "".join(found)


def test_the_first_occurrence_of_a_line_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = _write(tmp_path / "text")
    monkeypatch.setattr(sources, "_UNIT_BYTES", 1_000)
    changes = {"corpus__tokenizer": "bytes", "corpus__near_duplicates": False, "corpus__deduplicate": "lines"}
    url = prepare(small(tmp_path / "data", tmp_path / "text", **changes)).shards.dataset
    source = open_dataset(url)[0].source
    assert source["edits"] == {"repeated lines": 39 + 2 + 3}
    assert source["dropped"]["nothing but repeated lines"] == 1
    assert source["characters"] == sum(map(len, texts)) - 39 * (len(FOOTER) + 1) - len(texts[-2]) - (len(texts[3]) - 5)
    examples = [one for one in source["examples"] if one["reason"] == "repeated lines"]
    assert examples[0] == {"reason": "repeated lines", "name": "01.txt", "sample": FOOTER}
    assert _texts(url).count(FOOTER) <= 1

    monkeypatch.setattr(repeats, "_BUCKET_PIECES", 8)  # many buckets, and every stage in another order
    again = small(tmp_path / "again", tmp_path / "text", **changes)
    other = prepare(again, lambda function, items: map(function, reversed(items))).shards.dataset
    assert contents(other) == contents(url)


def test_the_first_occurrence_of_a_paragraph_stays(tmp_path: Path) -> None:
    texts = _write(tmp_path / "text")
    changes = {"corpus__tokenizer": "bytes", "corpus__near_duplicates": False, "corpus__deduplicate": "paragraphs"}
    source = open_dataset(prepare(small(tmp_path / "data", tmp_path / "text", **changes)).shards.dataset)[0].source
    assert source["edits"] == {"repeated paragraphs": 1}  # of the last text, the second
    assert source["characters"] == sum(map(len, texts)) - len(texts[3]) - 1


@given(
    st.lists(st.sampled_from(["", " ", "a", "b" * 60, "c" * 60]), max_size=20), st.sampled_from(["lines", "paragraphs"])
)
def test_pieces_are_the_whole_text(lines: list[str], kind: str) -> None:
    text = "\n".join(lines)
    found = list(pieces(lines, kind))
    assert [one.begin for one in found[1:]] == [one.end for one in found[:-1]]
    if any(line.strip() for line in lines):
        assert (found[0].begin, found[-1].end) == (0, len(lines))
    assert without(text, kind, lambda piece: False) == (text, [])
    kept, removed = without(text, kind, lambda piece: "b" in piece.text)
    assert all("b" in one for one in removed)
    assert kept.count("b") + sum(one.count("b") for one in removed) == text.count("b")
