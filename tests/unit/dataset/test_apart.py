"""Held-out text stays apart from what is trained on, over datasets and benchmarks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import prepare

from springtide import config as configs
from springtide.config import Config
from springtide.corpus.near_duplicates import SHINGLE, shingles
from springtide.dataset import open_dataset
from springtide.dataset.apart import read_shingles
from springtide.errors import ConfigError, CorpusError
from springtide.shards import HELDOUT, TRAIN, SplitReader
from springtide.storage import Folder
from springtide.stream import open_data

WORDS = ["".join(random.Random(n).choices("abcdefghijklmnopqrstuvwxyz", k=5)) for n in range(600)]


def texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=150)) for _ in range(count)]


def edited(text: str, seed: int) -> str:
    """The text with 1% of its words changed."""
    rng, words = random.Random(seed), text.split()
    for place in rng.sample(range(len(words)), max(1, len(words) // 100)):
        words[place] = rng.choice(WORDS)
    return " ".join(words)


def write(folder: Path, found: list[str]) -> Path:
    folder.mkdir()
    for number, text in enumerate(found):
        (folder / f"{number:04d}.txt").write_text(text)
    return folder


def config_of(source: Path, **changes: Any) -> Config:
    settings = {
        "corpus.source": str(source),
        "corpus.max_files": 0,
        "shards.root": str(source.parent / "data"),
        "shards.sequence_length": 32,
        "shards.rows_per_group": 2048,
        "shards.heldout_fraction": 0.2,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return configs.recipes.tiny().override(settings)


def made(source: Path, **changes: Any) -> str:
    return prepare(config_of(source, **changes)).shards.dataset


def documents(url: str, split: str) -> Iterator[list[str]]:
    """The words of each document of a split, but for what the last row cuts off."""
    manifest, vocabulary = open_dataset(url)
    rows = SplitReader(Folder(url), manifest, split).read(np.arange(manifest.splits[split].rows))
    line = np.append(rows.tokens[:, :-1].ravel(), rows.tokens[-1, -1])
    for part in np.split(line, np.flatnonzero(line == manifest.end_of_text) + 1):
        yield vocabulary.decode(part[part != manifest.end_of_text].tolist()).split()


def leaked(heldout: str, trained: str) -> int:
    """Held-out documents of one dataset that have a twin in the training rows of another."""

    def shingles(words: list[str]) -> set[tuple[str, ...]]:
        return {tuple(words[place : place + SHINGLE]) for place in range(len(words) - SHINGLE + 1)}

    here = [found for found in map(shingles, documents(heldout, HELDOUT)) if found]
    there = [shingles(words) for words in documents(trained, TRAIN)]
    return sum(any(len(one & other) > 0.8 * len(one | other) for other in there) for one in here)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("apart")


@pytest.fixture(scope="module")
def first(here: Path) -> str:
    return made(write(here / "first", texts(200, 1)))


@pytest.fixture(scope="module")
def second(here: Path) -> Path:
    """Twins of the first dataset's documents, exact copies of some, and text of its own."""
    old = texts(200, 1)
    return write(here / "second", [*(edited(text, 7) for text in old[:120]), *old[120:], *texts(100, 2)])


def test_text_that_another_dataset_holds_out_is_trained_on_nowhere(first: str, second: Path) -> None:
    alone = made(second)
    assert leaked(first, alone) > 5  # twins fall on either side of the split
    assert leaked(alone, first) > 5
    apart = made(second, corpus__apart_from=[first])
    assert leaked(first, apart) == leaked(apart, first) == 0
    manifest, _ = open_dataset(apart)
    dropped = manifest.source["dropped"]
    assert 30 < dropped["held out by corpus.apart_from"] < 60
    assert 10 < dropped["trained on by corpus.apart_from"] < 60
    kept = sum(split.documents for split in manifest.splits.values())
    assert kept + sum(dropped.values()) == manifest.source["documents"] == 300
    example = next(one for one in manifest.source["examples"] if one["reason"] == "held out by corpus.apart_from")
    assert (second / example["name"]).read_text().startswith(example["sample"])


def test_a_document_that_shares_only_a_band_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands only propose; similarity decides."""
    from springtide.corpus import signature
    from springtide.dataset import parts

    shared = np.full(16, 7, np.uint64)
    monkeypatch.setattr(parts, "signature", lambda ids: signature(ids)._replace(bands=shared))
    same = made(write(tmp_path / "same", texts(10, 1)), corpus__near_duplicates=False, shards__heldout_fraction=1)
    other = write(tmp_path / "other", texts(30, 3))
    url = made(other, corpus__near_duplicates=False, corpus__apart_from=[same])
    assert open_dataset(url)[0].source["dropped"] == {"duplicate": 0, "trained on by corpus.apart_from": 0}


def test_a_document_that_quotes_a_benchmark_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    question = "A train leaves the station at noon, and another one at two. When do they meet, and where exactly?"
    short, tiny = "Which of these eight planets has the rings?", "Paris."
    lines = [{"question": question}, {"question": short}, {"question": tiny}]
    (tmp_path / "benchmark.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = texts(60, 4)
    found[10] += (
        " A TRAIN leaves the station   at noon -- and another one at two; when do they meet and more. " + found[11]
    )
    found[20] = f"{found[20]} which of these eight planets has the rings {found[21]}"
    found[30] += " another one at two. When do they go? Paris."
    benchmark = {"source": str(tmp_path / "benchmark.jsonl"), "field": "question"}
    url = made(write(tmp_path / "text", found), corpus__apart_from=[benchmark])
    manifest, _ = open_dataset(url)
    assert manifest.source["dropped"]["quotes corpus.apart_from"] == 2
    names = {one["name"] for one in manifest.source["examples"] if one["reason"] == "quotes corpus.apart_from"}
    assert names == {"0010.txt", "0020.txt"}
    [told] = [one.getMessage() for one in caplog.records if "corpus.apart_from" in one.getMessage()]
    assert "1 of 3 benchmark texts" in told
    assert "fewer than 8 words" in told


def test_what_a_dataset_is_apart_from_is_part_of_it(tmp_path: Path) -> None:
    text = write(tmp_path / "text", texts(60, 4))
    (tmp_path / "benchmark.txt").write_text(" ".join(WORDS[:40]))
    one = made(text, corpus__apart_from=[str(tmp_path / "benchmark.txt")])
    (tmp_path / "benchmark.txt").write_text(" ".join(WORDS[100:150]))
    assert made(text, corpus__apart_from=[str(tmp_path / "benchmark.txt")]) != one
    with pytest.raises(CorpusError, match=r"nowhere.* exist"):
        made(text, corpus__apart_from=[str(tmp_path / "nowhere")])


def test_documents_of_another_vocabulary_cannot_be_compared(tmp_path: Path, first: str) -> None:
    text = write(tmp_path / "text", texts(60, 4))
    with pytest.raises(
        ConfigError, match=r"corpus.apart_from = .*another tokenizer.*corpus.tokenizer = .*tokenizer.json"
    ):
        made(text, corpus__apart_from=[first], corpus__tokenizer="bpe", corpus__vocab_size=300)


def test_a_changed_signature_file_is_named(tmp_path: Path) -> None:
    first = made(write(tmp_path / "first", texts(30, 1)))
    name = next(Path(first, "signatures").glob("heldout-*"))
    data = bytearray(name.read_bytes())
    data[100] ^= 1
    name.write_bytes(bytes(data))
    with pytest.raises(CorpusError, match=r"signatures/heldout-00000\.parquet.*changed"):
        made(write(tmp_path / "text", texts(60, 4)), corpus__apart_from=[first])


def test_the_held_out_split_is_capped_in_tokens(tmp_path: Path) -> None:
    text = write(tmp_path / "text", texts(200, 1))
    capped, whole = (open_dataset(made(text, shards__heldout_tokens=cap))[0] for cap in (5000, 0))
    assert 3000 < capped.splits[HELDOUT].tokens <= 5000 < whole.splits[HELDOUT].tokens
    assert capped.heldout_fraction < whole.heldout_fraction == 0.2
    totals = [sum(split.documents for split in one.splits.values()) for one in (capped, whole)]
    assert totals == [200, 200]
    with pytest.raises(CorpusError, match=r"shards.heldout_tokens"):
        made(text, shards__heldout_tokens=3)


def mixed(**corpora: str) -> Config:
    base = config_of(Path("nowhere"), stream__mixture=corpora)
    return base.override({"stream.global_batch": 4, "stream.lanes": 4})


def test_a_mixture_that_leaks_held_out_text_is_detected(tmp_path: Path, first: str, second: Path) -> None:
    """A mixture in which text of one leaks into another is refused or told."""
    other = made(second, shards__heldout_fraction=0.1)
    with pytest.raises(ConfigError, match=r"stream.mixture.b = .* 0\.1 .* a 0\.2 .*corpus.apart_from"):
        open_data(mixed(a=first, b=other).data)
    [told] = open_data(mixed(a=first, b=made(second)).data).leaks
    assert "stream.mixture: " in told
    assert "corpus.apart_from" in told
    for fraction in (0.2, 0.1):
        apart = made(second, shards__heldout_fraction=fraction, corpus__apart_from=[first])
        assert open_data(mixed(a=first, b=apart).data).leaks == ()


def test_a_dataset_to_evaluate_on_only_holds_out_all_its_text(tmp_path: Path, first: str, second: Path) -> None:
    only = made(write(tmp_path / "only", texts(40, 5)), shards__heldout_fraction=1)
    manifest, _ = open_dataset(only)
    assert set(manifest.splits) == {HELDOUT}
    assert manifest.splits[HELDOUT].documents == 40
    with pytest.raises(ConfigError, match=r"stream\.mixture\.b = .*held-out.*stream\.eval_datasets"):
        open_data(mixed(a=first, b=only).data)
    data = open_data(mixed(a=first).override({"stream.eval_datasets": {"only": only}}).data)
    assert data.eval_names == ("a", "only")
    assert "held-out text of only " in data.leaks[0]
    with pytest.raises(ConfigError, match=r"stream.eval_datasets.*'a'.*name"):
        open_data(mixed(a=first).override({"stream.eval_datasets": {"a": only}}).data)
    apart = made(second, corpus__apart_from=[only])
    assert open_data(mixed(b=apart).override({"stream.eval_datasets": {"only": only}}).data).leaks == ()
    with pytest.raises(ConfigError, match=r"shards.heldout_fraction.*0\.7"):
        config_of(tmp_path, shards__heldout_fraction=0.7)


def test_shingles_of_a_long_document_are_kept_twice_at_most(tmp_path: Path) -> None:
    """They were stored in every shard that it spans: time and bytes grew with the square of its length."""
    rng = random.Random(0)
    book = " ".join(rng.choices(WORDS, k=20_000))
    changes = {"shards__rows_per_group": 32, "shards__groups_per_shard": 8, "corpus__tokenizer": "bytes"}
    held = made(write(tmp_path / "held", [book]), shards__heldout_fraction=1.0, **changes)
    manifest, vocabulary = open_dataset(held)
    shards = manifest.splits[HELDOUT].shards
    assert len(shards) > 10
    counts = [len(read_shingles(Folder(held), shard)[0].values) for shard in shards]
    [ids] = vocabulary.encode([book])
    assert counts == [len(shingles(ids))] * 2 + [0] * (len(shards) - 2)
    others = write(tmp_path / "others", [*texts(40, 1), edited(book, 1)])
    dropped = open_dataset(made(others, corpus__apart_from=[held], **changes))[0].source["dropped"]
    assert dropped["held out by corpus.apart_from"] == 1


def test_a_book_whose_beginning_is_held_out_is_kept_apart_whole(tmp_path: Path) -> None:
    book = " ".join(random.Random(0).choices(WORDS, k=5000))
    held = made(write(tmp_path / "held", [book]), corpus__tokenizer="bytes")
    assert open_dataset(held)[0].splits[HELDOUT].tokens < len(book) * 0.3
    others = write(tmp_path / "others", [*texts(40, 1), edited(book, 1)])
    changes = {"corpus__apart_from": [held], "corpus__tokenizer": "bytes"}
    assert open_dataset(made(others, **changes))[0].source["dropped"]["held out by corpus.apart_from"] == 1
