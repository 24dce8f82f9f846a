"""The card shows examples of the duplicates that the plan drops, and nothing they hold becomes part of the page."""

from __future__ import annotations

import collections
import random
from pathlib import Path

import pytest
from prepared import contents, prepare, small, write_corpus

import springtide as st
from springtide.api.prepare import CARD
from springtide.corpus import sources
from springtide.dataset import open_dataset
from springtide.dataset.sealing import _total


def _write(folder: Path) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8))) for _ in range(2000)]
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(rng.choices(words, k=150)))
    text = (folder / "0.txt").read_text()
    (folder / "0 again.txt").write_text(text)
    middle = len(text) // 2
    (folder / "0 near<b>.txt").write_text(text[:middle] + "<script>alert(1)</script>\x1b[2J \u202e" + text[middle:])


def test_examples_of_duplicates_name_both_documents_and_show_where_they_differ(tmp_path: Path) -> None:
    _write(tmp_path / "text")
    changes = {"corpus__tokenizer": "bytes", "shards__seed": 3}
    config = small(tmp_path / "data", tmp_path / "text", **changes)
    dataset = st.prepare(config).shards.dataset
    source = open_dataset(dataset)[0].source
    assert source["dropped"] == {"duplicate": 1, "near duplicate": 1}
    exact, near = source["examples"]
    assert (exact["reason"], {exact["name"], exact["kept_name"]}) == ("duplicate", {"0.txt", "0 again.txt"})
    assert exact["sample"] == exact["kept_sample"] == (tmp_path / "text" / "0.txt").read_text()[:200]
    assert near["reason"] == "near duplicate"
    assert "0 near<b>.txt" in (near["name"], near["kept_name"])
    assert 0.7 <= near["similarity"] < 1
    assert sum("<script>" in near[name] for name in ("sample", "kept_sample")) == 1
    page = (Path(dataset) / CARD).read_text()
    assert "near duplicate" in page
    assert f"(similarity {near['similarity']:.2f})" in page
    assert "0 near&lt;b&gt;.txt" in page
    assert "&lt;script&gt;alert(1)" in page
    for hostile in ("<script>", "<b>", "\x1b", "\u202e"):
        assert hostile not in page


def test_what_is_dropped_does_not_depend_on_the_order_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_UNIT_BYTES", 8_000)
    write_corpus(tmp_path / "text")
    forwards = prepare(small(tmp_path / "one", tmp_path / "text")).shards.dataset
    backwards = prepare(
        small(tmp_path / "two", tmp_path / "text"), lambda function, items: map(function, reversed(items))
    ).shards.dataset
    assert contents(forwards) == contents(backwards)
    assert open_dataset(forwards)[0].source["dropped"] == {"duplicate": 10, "near duplicate": 10}


def test_totals_are_the_sum_of_the_counts_in_the_same_order() -> None:
    rng = random.Random(0)
    records = [{"edits": {f"{rng.randrange(50)}": rng.randrange(3) for _ in range(6)}} for _ in range(200)]
    wanted = sum((collections.Counter(record["edits"]) for record in records), collections.Counter[str]())
    assert list(_total(records, "edits").items()) == list(wanted.items())
