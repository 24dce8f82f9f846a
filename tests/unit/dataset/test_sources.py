"""Several sources in one dataset: each text once, rows of one source each, and a corpus of its own for each."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import contents, prepare, small

from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.dataset import open_dataset
from springtide.errors import ConfigError, CorpusError
from springtide.shards import HELDOUT, TRAIN, ids_of
from springtide.stream import open_data
from springtide.stream.chain import corpus_and_row

SIZES = {"web": 90, "wiki": 40, "code": 20}
LETTERS = {"web": "abcdefgh", "wiki": "ijklmnop", "code": "qrstuvwxyz"}


def texts_of(name: str, count: int) -> list[str]:
    rng = random.Random(name)
    words = ["".join(rng.choices(LETTERS.get(name, name), k=rng.randint(3, 9))) for _ in range(600)]
    return [" ".join(rng.choices(words, k=rng.randint(30, 120))) for _ in range(count)]


def written(folder: Path, texts: Iterable[str]) -> str:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    return str(folder)


@pytest.fixture
def three(tmp_path: Path) -> Config:
    """Three sources whose texts have letters of their own; the later two also have texts of those before."""
    texts = {name: texts_of(name, count) for name, count in SIZES.items()}
    texts["wiki"] += texts["web"][:5]
    texts["code"] += texts["wiki"][:5] + [f"{text} {text[:4]}" for text in texts["web"][5:9]]
    sources = {name: written(tmp_path / name, found) for name, found in texts.items()}
    return small(tmp_path / "data", tmp_path / "nowhere", corpus__sources=sources)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_row_holds_one_source_and_a_text_is_kept_once(three: Config, packing: str) -> None:
    """A row holds documents of one source and a text is kept once."""
    changes = {"shards.packing": packing, "shards.mask_across_documents": packing == "best_fit"}
    config = prepare(three.override(changes))
    manifest, vocabulary = open_dataset(config.shards.dataset)
    assert manifest.source["dropped"]["duplicate"] == 10
    assert manifest.source["dropped"]["near duplicate"] == 4
    data = open_data(config.data)
    assert set(data.names) == set(SIZES)
    for name, corpus, reader in zip(data.names, data.corpora, data.splits(TRAIN), strict=True):
        rows = reader.read(np.arange(corpus.rows))
        assert rows.sample_ids.tolist() == list(range(corpus.rows))
        letters = set("".join(vocabulary.decode(row.tolist()) for row in ids_of(rows.tokens))) - set(" <|endoftext|>")
        assert set() < letters <= set(LETTERS[name])
        splits = manifest.sources[name]
        assert sum(split.documents for split in splits.values()) == SIZES[name], "the first source keeps a copy"
    assert sum(corpus.rows for corpus in data.corpora) == manifest.splits[TRAIN].rows
    assert sum(split[HELDOUT].rows for split in manifest.sources.values()) == manifest.splits[HELDOUT].rows


def test_which_source_a_row_is_of_is_in_its_sample_id(three: Config) -> None:
    config = prepare(three)
    data = open_data(config.data)
    ids = data.order.batch(data.order.step_after(StepsDone(0)))
    stored, tokens = data.rows(ids)
    assert np.array_equal(stored, ids)
    vocabulary = open_dataset(config.shards.dataset)[1]
    for corpus, row in zip(corpus_and_row(ids)[0].tolist(), ids_of(tokens), strict=True):
        assert set(vocabulary.decode(row.tolist())) - set(" <|endoftext|>") <= set(LETTERS[data.names[corpus]])


def test_sources_are_weighed_by_name_or_by_rows(three: Config) -> None:
    """Sources are weighed by name and by their rows if none is given."""
    config = prepare(three)
    data = open_data(config.data)
    rows = {corpus.name: corpus.rows for corpus in data.corpora}
    steps = StepsDone(50)
    total = 50 * config.stream.global_batch
    for name, (drawn, _) in data.drawn(steps).items():
        assert abs(drawn - total * rows[name] / sum(rows.values())) <= 4
    shares = {"web": 1, "wiki": 2, "code": 5}
    weighed = open_data(config.override({"stream.weights": [{"shares": shares}]}).data)
    for name, (drawn, epochs) in weighed.drawn(steps).items():
        assert abs(drawn - total * shares[name] / 8) <= 4
        assert epochs == drawn / rows[name]


def test_a_mixture_has_the_sources_of_its_datasets(three: Config, tmp_path: Path) -> None:
    both = prepare(three).shards.dataset
    plain = small(tmp_path / "data", tmp_path / "plain")
    written(tmp_path / "plain", texts_of("plain text", 60))
    config = three.override({"stream.mixture": {"many": both, "plain": prepare(plain).shards.dataset}})

    def data_of(*tables: dict[str, Any]) -> Any:
        return open_data(config.override({"stream.weights": tables}).data)

    data = data_of({"shares": {"many": 3, "plain": 1}})
    names = ["many/code", "many/web", "many/wiki"]
    assert data.names == (*names, "plain")
    assert data.eval_names == data.names
    shares = data.shares(StepsDone(0))
    rows = {corpus.name: corpus.rows for corpus in data.corpora}
    within = sum(rows[name] for name in names)
    assert shares["plain"] == pytest.approx(0.25)
    assert {name: shares[name] for name in names} == pytest.approx({name: 0.75 * rows[name] / within for name in names})
    assert data_of({"shares": {"many/web": 3, "plain": 1}}).shares(StepsDone(0)) == {"many/web": 0.75, "plain": 0.25}
    assert set(data.datasets) == {both, config.stream.mixture["plain"]}
    for shares, message in (
        ({"many": 1, "many/web": 1}, r"'many/web': is a source of many, which has a weight, too"),
        ({"many/wob": 1}, r"'many/wob': is not a corpus of this run; did you mean 'many/web'"),
    ):
        with pytest.raises(ConfigError, match=message):
            data_of({"shares": shares})


def test_a_mixture_whose_names_meet_is_refused(three: Config) -> None:
    both = prepare(three).shards.dataset
    for changes in (
        {"stream.mixture": {"a": both, "a/web": both}},
        {"stream.mixture": {"a": both}, "stream.eval_datasets": {"a": both}},
    ):
        refused = pytest.raises(ConfigError, match=r"stream\.(mixture|eval_datasets) = 'a/\w+': .*corpus")
        if len(changes) == 1:  # a/web is a/web/code and so on: no clash
            assert len(open_data(three.override(changes).data).names) == 6
        else:
            with refused:
                open_data(three.override(changes).data)


def test_one_source_is_what_it_was_by_any_name(tmp_path: Path) -> None:
    """Its rows, and the order of them."""
    written(tmp_path / "text", texts_of("web", 60))
    unnamed = prepare(small(tmp_path / "one", tmp_path / "text"))
    named = prepare(small(tmp_path / "two", tmp_path / "nowhere", corpus__sources={"web": str(tmp_path / "text")}))
    files = [contents(config.shards.dataset) for config in (unnamed, named)]
    shards = [{name: one for name, one in found.items() if "parquet" in name} for found in files]
    assert shards[0] == shards[1]
    orders = [open_data(config.data).order for config in (unnamed, named)]
    assert open_data(unnamed.data).names == ("corpus",)
    assert open_data(named.data).names == ("web",)
    for step in range(5):
        assert np.array_equal(orders[0].batch(step), orders[1].batch(step))
    assert len(orders[0].manifests) == len(orders[0].manifests[0].split("/")) == 1


def test_a_source_without_a_row_is_refused_by_name(tmp_path: Path) -> None:
    sources = {
        "web": written(tmp_path / "web", texts_of("web", 60)),
        "copies": written(tmp_path / "copies", texts_of("web", 3)),
    }
    with pytest.raises(CorpusError, match=r"train split .*corpus\.sources\.copies .*0 tokens"):
        prepare(small(tmp_path / "data", tmp_path, corpus__sources=sources))


def test_a_source_may_hold_out_nothing(tmp_path: Path) -> None:
    sources = {
        "web": written(tmp_path / "web", texts_of("web", 60)),
        "few": written(tmp_path / "few", texts_of("klmno", 2)),
    }
    config = prepare(small(tmp_path / "data", tmp_path, corpus__sources=sources, shards__heldout_fraction=0.05))
    data = open_data(config.data)
    assert data.names == ("few", "web")
    assert data.eval_names == ("web",)
    assert len(data.splits(HELDOUT)) == 1
    assert data.heldout_shares(StepsDone(0)) == {"web": 1.0}
    only_few = open_data(config.override({"stream.weights": [{"shares": {"few": 1}}]}).data)
    assert only_few.heldout_shares(StepsDone(0)) == {"web": 1.0}
