"""The card says what the manifest knows, and nothing a text holds becomes part of the page."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import springtide as st
from springtide.api.prepare import CARD
from springtide.dataset import open_dataset
from springtide.errors import printable
from springtide.run.report.charts import Bars, draw
from springtide.run.report.html import page as render_page


def test_a_dataset_gets_its_card(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    for part in ("poems", "prose<b>"):
        (folder / part).mkdir(parents=True)
        for number in range(30):
            (folder / part / f"{number}.txt").write_text(
                f"<script>alert({number})</script> {part} line {number}\n" * 3 * number
            )
    lines = [json.dumps({"text": f"a line of its own, number {number} & more " * 5}) for number in range(20)]
    (folder / "lines.jsonl").write_text("\n".join([*lines, "{broken<i>"]))
    changes = {"corpus.source": str(folder), "corpus.near_duplicates": False, "shards.root": str(tmp_path / "data")}
    config = st.prepare(st.recipes.tiny().override({**changes, "corpus.max_files": 0, "shards.sequence_length": 16}))
    manifest, _ = open_dataset(config.shards.dataset)
    groups = dict(manifest.source["tokens_by_group"])
    assert set(groups) == {"poems", "prose<b>", "lines.jsonl", "others"}
    assert sum(groups.values()) == manifest.source["tokens_before_deduplication"]
    assert groups["others"] == 0
    page = (Path(config.shards.dataset) / CARD).read_text()
    assert manifest.digest in page
    assert "<script>" not in page
    assert "<i>" not in page
    for told in ("prose&lt;b&gt;", "of 81 read", "empty", "not JSON", "{broken&lt;i&gt;", "64 to 255"):
        assert told in page, told
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    words = {text.strip() for svg in pictures for text in ET.fromstring(svg).itertext()}
    assert {"poems", "prose<b>", "lines.jsonl", "kept", "train", "heldout"} <= words


def test_names_that_are_no_text_are_told_as_far_as_they_are(tmp_path: Path) -> None:
    """File names are bytes: some are not UTF-8, some have control characters."""
    folder = tmp_path / "text"
    for part in (b"ber\xff", b"bell\x07\x1b[2J"):
        (folder / os.fsdecode(part)).mkdir(parents=True)
        for number in range(30):
            (folder / os.fsdecode(part) / f"{number}.txt").write_text(f"line {number} of the sea\n" * 3 * number)
    (folder / os.fsdecode(b"li\xfe\x02nes.jsonl")).write_text("{broken")
    changes = {"corpus.source": str(folder), "corpus.near_duplicates": False, "shards.root": str(tmp_path / "data")}
    config = st.prepare(st.recipes.tiny().override({**changes, "corpus.max_files": 0, "shards.sequence_length": 16}))
    manifest, _ = open_dataset(config.shards.dataset)
    assert [found["name"] for found in manifest.source["broken"]] == ["li\ufffd\ufffdnes.jsonl@0"]
    page = (Path(config.shards.dataset) / CARD).read_text(encoding="utf-8")
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    words = {text.strip() for svg in pictures for text in ET.fromstring(svg).itertext()}
    assert {"ber\ufffd", "bell\ufffd\ufffd[2J"} <= words
    assert "li\ufffd\ufffdnes.jsonl@0: not JSON" in page
    with pytest.raises(UnicodeEncodeError):
        "\udcff".encode()
    assert printable("a\x00\udcff\ufffe\t\n\u00e9") == "a\ufffd\ufffd\ufffd\t\n\u00e9"
    made = draw([Bars("title\x07", "x\udcff", [("bar\x1b", 1.0)])])
    ET.fromstring(made.encode())
    render_page("run\udcff", ["<p>\udcff</p>"]).encode()


def test_a_dataset_that_was_there_keeps_its_card(tiny: st.Config) -> None:
    card = Path(tiny.shards.dataset) / CARD
    made = card.read_bytes() if card.exists() else None
    try:
        card.write_text("a note of whoever made it")
        st.prepare(tiny.override({"shards.dataset": ""}))
        assert card.read_text() == "a note of whoever made it"
        card.unlink()  # as a kill behind the manifest leaves it
        st.prepare(tiny.override({"shards.dataset": ""}))
        assert open_dataset(tiny.shards.dataset)[0].digest in card.read_text()
    finally:
        if made is not None:
            card.write_bytes(made)
