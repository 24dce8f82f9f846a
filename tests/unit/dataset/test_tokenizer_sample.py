"""What a tokenizer is trained on: a part of every source and of its units."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared import prepare

from springtide import config as configs
from springtide.config.data import CorpusConfig, ShardsConfig
from springtide.corpus import open_source, sources
from springtide.dataset import open_dataset
from springtide.dataset.make import sample
from springtide.dataset.parts import PartJob
from springtide.storage import Folder

CODE, WEB = "zq" * 40, "the web "


def jobs_of(*folders: Path) -> list[PartJob]:
    corpus, shards, work = CorpusConfig(), ShardsConfig(), Folder("memory://sample-work")
    found = [open_source(str(folder)) for folder in folders]
    units = [(source, unit) for source in found for unit in source.units()]
    return [PartJob(number, source, corpus, unit, "", shards, work) for number, (source, unit) in enumerate(units)]


@pytest.fixture(params=[20_000])
def folders(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Text of which one part in thirty is code: 60 units of web, 10 of code."""
    monkeypatch.setattr(sources, "_UNIT_BYTES", request.param)
    web, code = tmp_path / "web", tmp_path / "code"
    for folder, word, files, size in ((web, WEB, 3, 20 * request.param), (code, CODE, 10, request.param // 5)):
        folder.mkdir()
        for number in range(files):
            rng = random.Random(number)
            lines = [f'{{"text": "{word}{rng.random()} {word * 20}"}}' for _ in range(max(1, size // len(word) // 21))]
            name = f"{number}.jsonl"
            (folder / name).write_text("\n".join(lines))
    return web, code


@pytest.mark.parametrize("most_units", [4, 1024])
def test_a_minority_source_is_always_seen(folders: tuple[Path, Path], most_units: int) -> None:
    jobs = jobs_of(*folders)
    for seed in range(10):
        texts = list(sample(seed, jobs, 60_000, most_units=most_units))
        assert sum(map(len, texts)) <= 60_000
        shares = [sum(len(text) for text in texts if text.startswith(word[:2])) for word in (WEB, CODE)]
        assert sum(shares) > 60_000 * 0.8
        assert 500 < shares[1] < 10_000  # 2,000 in proportion to its bytes


def test_the_sample_is_seeded_and_repeats_no_text(folders: tuple[Path, Path]) -> None:
    jobs = jobs_of(folders[0], folders[1], folders[1])
    texts = list(sample(3, jobs, 100_000))
    assert texts == list(sample(3, jobs, 100_000)) != list(sample(4, jobs, 100_000))
    assert len(set(texts)) == len(texts)


@given(st.integers(0, 5), st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 600))
def test_all_text_is_read_where_there_is_no_more_of_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, sizes: list[int], characters: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    texts = [chr(ord("a") + number) * size for number, size in enumerate(sizes)]
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_UNIT_FILES", 2)
        found = list(sample(seed, jobs_of(folder), characters))
    assert sum(map(len, found)) <= characters
    if characters >= sum(sizes):
        assert sorted(found) == sorted(texts)


@pytest.mark.parametrize("folders", [4_000], indirect=True)
def test_words_of_the_minority_become_tokens(folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = configs.recipes.tiny().override(
        {
            "corpus.sources": {folder.name: str(folder) for folder in folders},
            "corpus.tokenizer": "bpe",
            "corpus.tokenizer_characters": 4_000,
            "corpus.max_files": 0,
            "corpus.vocab_size": 300,
            "corpus.near_duplicates": False,
            "shards.root": str(tmp_path / "data"),
        }
    )
    _, vocabulary = open_dataset(prepare(config).shards.dataset)
    [ids] = vocabulary.encode([CODE])
    assert len(ids) < 12
