"""What a prepare says of a folder: files left out, records lost, and what it refuses before anything is sealed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared import LENGTH, prepare, small

from springtide.api.prepare import write_card
from springtide.cli.inspect import show_dataset
from springtide.corpus import Document
from springtide.dataset import open_dataset
from springtide.errors import CorpusError
from springtide.shards import HELDOUT, TRAIN, SplitReader
from springtide.storage import Folder

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
    show_dataset(url, False, False)
    assert "files left out: data/README.md, data/_SUCCESS, " in capsys.readouterr().out
    assert "data/_SUCCESS" in Path(write_card(url)).read_text()


def refused(root: Path, source: Path, problem: str, **changes: Any) -> None:
    """Check that a prepare is refused with this error, and leaves nothing behind."""
    with pytest.raises(CorpusError, match=problem):
        prepare(small(root / "made", source, **changes))
    assert not (root / "made").exists() or not list((root / "made").iterdir())


def prepared(root: Path, source: Path, **changes: Any) -> dict[str, Any]:
    """Return what the manifest says of the source."""
    changes = {"corpus__near_duplicates": False, **changes}
    return dict(open_dataset(prepare(small(root / "made", source, **changes)).shards.dataset)[0].source)


def test_a_field_that_no_record_has_is_named_with_those_there(tmp_path: Path) -> None:
    lines = of_lines(tmp_path / "a.jsonl", [{"body": text, "path": "x"} for text in TEXTS])
    told = r"corpus\.field = 'text': is no text in 300 of the 300 records of .*a\.jsonl: the first has body, path; name"
    refused(tmp_path, lines, told)
    wrapped = tmp_path / "b.json"
    wrapped.write_text(json.dumps({"version": 1, "data": [{"text": text} for text in TEXTS]}))
    refused(tmp_path, wrapped, r"is no text in 1 of the 1 records of .*b\.json: the first has version, data")
    of_lines(tmp_path / "c.jsonl", [[1, "a list"]] * 3)
    refused(
        tmp_path,
        tmp_path / "c.jsonl",
        r"c\.jsonl': 3 of 3 records cannot be used: 3 no text in 'text'; the first: c.jsonl@0",
    )


def test_each_source_is_judged_by_itself(tmp_path: Path) -> None:
    good = of_lines(tmp_path / "good.jsonl", [{"text": text} for text in TEXTS])
    bad = of_lines(tmp_path / "bad.jsonl", [{"body": text} for text in TEXTS])
    sources = {"one": str(good), "two": {"source": str(bad), "field": "content"}}
    told = r"corpus\.field = 'content': is no text in 300 of the 300 records of .*bad\.jsonl: the first has body"
    refused(tmp_path, tmp_path, told, corpus__sources=sources)


CASES = [(3, False, False), (4, True, False), (299, True, False), (301, True, True)]


@pytest.mark.parametrize(("num_lost", "is_told", "is_refused"), CASES)
def test_lost_records_are_told_from_one_in_a_hundred(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_lost: int, is_told: bool, is_refused: bool
) -> None:
    """More than half are refused: a corpus would vanish with a few words at the end."""
    lines = of_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    with lines.open("a") as file:
        file.writelines('{"text": "never closed\n' for _ in range(num_lost))
    total = 300 + num_lost
    first = r"a\.jsonl@\d+: '\{\\?\"text\\?\": "
    if is_refused:
        refused(
            tmp_path, lines, rf"{num_lost} of {total} records cannot be used: {num_lost} not JSON; the first: {first}"
        )
        return
    assert prepared(tmp_path, lines)["dropped"]["not JSON"] == num_lost
    told = [one for one in caplog.messages if "records are not used" in one]
    assert len(told) == is_told
    if told:
        assert (
            f"a.jsonl': {num_lost} of {total} records are not used: {num_lost} not JSON; the first: a.jsonl@" in told[0]
        )


def test_bytes_that_are_no_utf_8_are_counted_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [json.dumps({"text": f"{text} caf\u00e9"}, ensure_ascii=False) for text in TEXTS]
    data = [line.encode("utf-8" if number % 5 else "latin-1") for number, line in enumerate(lines)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([b'{"text": "plain"}', *data]))
    assert prepared(tmp_path, tmp_path / "a.jsonl")["edits"] == {"bytes that are not UTF-8 replaced: documents": 60}
    [told] = [one for one in caplog.messages if "UTF-8" in one]
    assert "a.jsonl': 60 documents have U+FFFD where bytes are not UTF-8, the first a.jsonl@18; convert" in told
    dropped = prepared(tmp_path, tmp_path / "a.jsonl", corpus__broken_text="drop")["dropped"]
    assert dropped["not UTF-8"] == 60
    assert "a.jsonl': 60 of 301 records are not used: 60 not UTF-8" in caplog.messages[-1]


def test_a_mark_where_files_were_joined_is_skipped(tmp_path: Path) -> None:
    halves = ["".join(json.dumps({"text": text}) + "\n" for text in some) for some in (TEXTS[:150], TEXTS[150:])]
    (tmp_path / "a.jsonl").write_text("".join("\ufeff" + half for half in halves), encoding="utf-8")
    assert not any(prepared(tmp_path, tmp_path / "a.jsonl")["dropped"].values())


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "empty"])
def test_a_source_without_text_is_refused_for_what_it_is(tmp_path: Path, name: str) -> None:
    if name == "empty":
        (tmp_path / "a.jsonl").touch()
        refused(tmp_path, tmp_path / "a.jsonl", r"a\.jsonl': holds no text; point it at files that are not empty")
    elif name == "a.txt":
        (tmp_path / name).write_text("short")
        told = r"1 of 1 records cannot be used: 1 short; .*loosen corpus\.min_characters"
        refused(tmp_path, tmp_path / name, told, corpus__min_characters=100)
    else:
        (tmp_path / name).write_bytes(b'{"text": "one"}\r{"text": "two"}')
        refused(tmp_path, tmp_path / name, r"1 of 1 records cannot be used: 1 not JSON; the first: a\.jsonl@0: ")


BOOK = "\n".join(f"Line {number} of the book, and {number * 7919} is its number." for number in range(400))


def text_of(url: str, split: str) -> str:
    """Return the text of a split end to end."""
    manifest, vocabulary = open_dataset(url)
    rows = SplitReader(Folder(url), manifest, split).read(np.arange(manifest.splits[split].rows)).tokens
    return vocabulary.decode([*rows[:, :-1].ravel().tolist(), int(rows[-1, -1])])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["book.txt", "book.jsonl"])
def test_the_beginning_of_a_single_document_is_held_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, seed: int
) -> None:
    """The rest is trained on, and no token is in both."""
    book = f"{seed}\n{BOOK}"
    (tmp_path / name).write_text(book if name == "book.txt" else json.dumps({"text": book}))
    config = small(tmp_path / "made", tmp_path / name, corpus__tokenizer="bytes")
    url = prepare(config).shards.dataset
    heldout, train = text_of(url, HELDOUT), text_of(url, TRAIN)
    assert book.startswith(heldout)
    assert len(book) * 0.1 - LENGTH <= len(heldout) <= len(book) * 0.1 + 1
    assert train in book[len(heldout) :]
    assert len(train) + len(heldout) > len(book) - 3 * LENGTH
    shown = name if name == "book.txt" else "book.jsonl@0"
    assert (
        f"too few documents to hold out one: the first {round(0.1 * (len(book) + 1)):,} tokens of {shown}"
        in caplog.text
    )
    assert prepare(config).shards.dataset == url


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_of_a_few_books_a_part_of_the_longest_is_held_out(tmp_path: Path, packing: str) -> None:
    for number, length in enumerate((2000, 9000, 3000)):
        (tmp_path / "books" / f"{number}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "books" / f"{number}.txt").write_text(f"Book {number}\n" + BOOK[number:length])
    changes = {"shards__packing": packing, "shards__mask_across_documents": packing == "best_fit"}
    changes |= {"shards__heldout_fraction": 0.0001, "corpus__tokenizer": "bytes", "corpus__near_duplicates": False}
    manifest, _ = open_dataset(prepare(small(tmp_path / "made", tmp_path / "books", **changes)).shards.dataset)
    assert (manifest.splits[TRAIN].documents, manifest.splits[HELDOUT].documents) == (3, 1)
    assert manifest.splits[HELDOUT].tokens == LENGTH + 1


def test_a_single_document_that_would_be_held_out_is_cut(tmp_path: Path) -> None:
    books = (f"{number}\n{BOOK}" for number in range(100))
    book = next(one for one in books if int.from_bytes(Document("", one).digest[:8], "little") < 2**62)
    (tmp_path / "book.txt").write_text(book)
    changes = {"corpus__tokenizer": "bytes", "shards__heldout_fraction": 0.4}
    url = prepare(small(tmp_path / "made", tmp_path / "book.txt", **changes)).shards.dataset
    assert open_dataset(url)[0].splits[HELDOUT].tokens == round(0.4 * (len(book) + 1))
    assert text_of(url, TRAIN) in book


def test_a_document_of_less_than_two_rows_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 2 * LENGTH)
    told = r"the heldout split of '.*a\.txt' has only 0 tokens in 0 documents, not one row; shorten the sequence"
    refused(tmp_path, tmp_path / "a.txt", told, corpus__tokenizer="bytes", shards__heldout_fraction=0.0001)
