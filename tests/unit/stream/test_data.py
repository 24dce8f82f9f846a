"""Several corpora as one stream: what goes together, and what the weights' tables mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prepared import prepare

from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.errors import ConfigError
from springtide.stream import open_data


@pytest.fixture
def mixed(tiny: Config, poems: str) -> Config:
    """Two corpora, three to one."""
    return tiny.override(
        {
            "stream.mixture": {"code": tiny.shards.dataset, "poems": poems},
            "stream.weights": [{"shares": {"code": 3, "poems": 1}}],
        }
    )


def weighted(config: Config, *tables: dict[str, Any]) -> Config:
    return config.override({"stream.weights": tables})


def test_without_weights_each_corpus_counts_by_its_rows(mixed: Config) -> None:
    data = open_data(weighted(mixed).data)
    rows = [manifest.splits["train"].rows for manifest in data.manifests]
    assert data.order.schedule == ((0, (float(rows[0]), float(rows[1]))),)
    assert data.names == ("code", "poems")


def test_a_table_may_begin_at_a_step_or_at_tokens(mixed: Config) -> None:
    step = mixed.tokens_per_step
    tables = (
        {"from_tokens": 7 * step + 1, "shares": {"poems": 2}},
        {"shares": {"code": 1}},
        {"from_step": 30, "shares": {"code": 1, "poems": 1}},
    )
    schedule = open_data(weighted(mixed, *tables).data).order.schedule
    assert schedule == ((0, (1.0, 0.0)), (8, (0.0, 2.0)), (30, (1.0, 1.0)))


def test_what_was_drawn_is_counted_a_corpus(mixed: Config) -> None:
    drawn = open_data(mixed.data).drawn(40)
    assert drawn["code"].rows + drawn["poems"].rows == 40 * mixed.stream.global_batch
    assert abs(drawn["poems"].rows - 40 * mixed.stream.global_batch / 4) <= 1
    assert 0 < drawn["code"].epochs < drawn["poems"].epochs


def test_how_often_a_run_will_read_a_corpus_is_said_before(mixed: Config) -> None:
    data = open_data(mixed.data)
    rows = {name: manifest.splits["train"].rows for name, manifest in zip(data.names, data.manifests, strict=True)}
    share = {"code": mixed.stream.global_batch * 3 // 4, "poems": mixed.stream.global_batch // 4}
    once = min(rows[name] // share[name] for name in rows)
    assert data.repeats(StepsDone(once - 1)) == []
    many = 10 * max(rows[name] // share[name] for name in rows)
    said = data.repeats(StepsDone(many))
    for name, line in zip(rows, said, strict=True):
        assert line.startswith(f"this run reads {name} {many * share[name] / rows[name]:.1f} times")
        assert "less and less" in line


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([{"shares": {"cod": 1}}], r"'cod': is not a corpus of this run; did you mean 'code'"),
        ([{"shares": {"code": 0}}], r"are all zero"),
        ([{"from_step": 2, "shares": {"code": 1}}], r"give a table from step 0"),
        ([{"shares": {"code": 1}}, {"shares": {"poems": 1}}], r"two tables begin at this step"),
    ],
)
def test_tables_that_cannot_be_dealt_are_refused(mixed: Config, tables: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_data(weighted(mixed, *tables).data)


def test_corpora_of_different_vocabularies_or_lengths_do_not_mix(mixed: Config, tmp_path: Path) -> None:
    other = mixed.override({"stream.mixture": {}, "shards.dataset": "", "shards.root": str(tmp_path)})
    bpe = prepare(other.override({"corpus.tokenizer": "bpe", "corpus.vocab_size": 300}))
    corpora = {"code": mixed.stream.mixture["code"], "bpe": bpe.shards.dataset}
    with pytest.raises(ConfigError, match=r"stream.mixture.bpe = .* another tokenizer"):
        open_data(mixed.override({"stream.mixture": corpora}).data)
    with pytest.raises(ConfigError, match=r"shards\.sequence_length = 32: .* 64\b"):
        open_data(mixed.override({"shards.sequence_length": 32}).data)


def test_a_corpus_added_later_changes_nothing_before_its_step(tiny: Config, mixed: Config) -> None:
    alone = open_data(tiny.data).order
    tables = {"shares": {"code": 1}}, {"from_step": 9, "shares": {"code": 1, "poems": 1}}
    grown = open_data(weighted(mixed, *tables).data).order
    assert [grown.identity_at(step) == alone.identity_at(step) for step in (0, 5, 9, 10)] == [True, True, True, False]
    assert all((grown.batch(step) == alone.batch(step)).all() for step in range(9))
    assert grown.batch(9).max() >= 2**48
