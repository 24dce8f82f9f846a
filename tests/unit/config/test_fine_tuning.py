"""Recipes that go on from a model: what they take of its run, and what the command line says of one that is not there."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from springtide import config as configs
from springtide.api.prepare import prepare
from springtide.api.resolve import absolute
from springtide.cli.main import main
from springtide.cli.options import add_config, config_of
from springtide.config import Config
from springtide.config.recipes import FINE_TUNING
from springtide.errors import ConfigError
from springtide.run.folder import Run
from springtide.storage import Folder


@pytest.fixture
def model(tmp_path: Path) -> Run:
    """The folder of a run with settings that are not the usual ones; nothing of it but them is read here."""
    config = configs.recipes.tiny().override(
        {
            "run.root": str(tmp_path),
            "run.id": "model",
            "shards.dataset": "s3://bucket/data",
            "model.num_heads": 8,
            "elastic.max_workers": 3,
            "track.price": 2.5,
            "stream.skip": [4],
            "optim.ema_half_life": 1000,
            "train.seed": 5,
        }
    )
    run = Run(Folder(str(tmp_path / "model")))
    run.write_config(config)
    return run


def parsed(*words: str) -> Config:
    """The config of a command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config(parser, show_all=False)
    return config_of(parser.parse_args(list(words)))


@pytest.mark.parametrize("name", sorted(FINE_TUNING))
def test_fine_tuning_inherits_model_and_tokenizer_only(name: str, model: Run) -> None:
    """It takes the model and its tokenizer and no data or workers."""
    named = ("--stream.mixture", "{new: '', old: s3://bucket/data}") if name == "continue" else ()
    words = ("--recipe", name, "--train.start-from", model.folder.url, "--run.id", "tuned", *named)
    before, found = model.config, parsed(*words)
    assert (found.model.num_heads, found.model.dim) == (8, before.model.dim)
    assert (found.elastic, found.track, found.checkpoint) == (Config().elastic, Config().track, Config().checkpoint)
    assert found.corpus.tokenizer == "s3://bucket/data/tokenizer.json"
    assert (found.corpus.source, found.shards.dataset, found.stream.skip, found.train.seed) == ("", "", (), 0)
    assert (found.train.start_from, found.train.start_with) == (model.folder.url, "weights")
    assert (found.run.id, found.run.root, found.optim.ema_half_life) == ("tuned", "runs", 0)
    assert found.shards.sequence_length == before.shards.sequence_length
    assert (found.model.adapter == "none") == (name != "lora")
    assert found == configs.parse(configs.dump(found).encode())


def test_what_is_given_wins(model: Run) -> None:
    given = ("--model.adapter-rank", "4", "--corpus.tokenizer", "t.json")
    found = parsed("--recipe", "lora", "--train.start-from", model.folder.url, *given)
    assert (found.model.adapter_rank, found.corpus.tokenizer) == (4, "t.json")


def test_texts_are_packed_as_the_base_run_and_replayed(model: Run) -> None:
    """Texts are packed as the runs and the old ones are replayed.

    Two generations: what a continued run has learned is replayed by the next one."""
    before, typed = model.config, ("--run.root", "s3://bucket/runs")
    for name in ("distill", "continue"):
        found = parsed("--recipe", name, "--train.start-from", model.folder.url, *typed)
        assert (found.shards.packing, found.shards.rows_per_group) == ("concat", before.shards.rows_per_group)
        assert found.optim.peak_lr == pytest.approx(before.optim.peak_lr / 3)
        assert found.optim.warmup == before.optim.warmup
    assert found.stream.mixture == {"new": "", "old": "s3://bucket/data"}
    model.write_config(found.override({"stream.mixture": {**found.stream.mixture, "new": "s3://bucket/new"}}))
    again = parsed("--recipe", "continue", "--train.start-from", model.folder.url, *typed)
    assert again.stream.mixture == {"new": "", "old-new": "s3://bucket/new", "old-old": "s3://bucket/data"}
    assert again.stream.weights[0].shares == {"new": 3, "old-new": 0.5, "old-old": 0.5}
    model.write_config(before.override({"shards.dataset": ""}))
    with pytest.raises(ConfigError, match="replay"):
        parsed("--recipe", "continue", "--train.start-from", model.folder.url)


def test_the_new_text_is_prepared_beside_the_old_one(tiny: Config) -> None:
    mixed = {"shards.dataset": "", "stream.mixture": {"new": "", "old": "s3://bucket/data"}}
    found = prepare(tiny.override(mixed))
    assert found.stream.mixture == {"new": tiny.shards.dataset, "old": "s3://bucket/data"}
    assert found.shards.dataset == ""
    assert prepare(found) == found
    assert absolute(tiny.override(mixed)).stream.mixture["new"] == ""


def test_an_adapter_that_is_there_is_trained_on(model: Run) -> None:
    model.write_config(model.config.override({"model.adapter": "dora", "model.adapter_rank": 2}))
    found = parsed("--recipe", "lora", "--train.start-from", f"{model.folder.url}/checkpoints/step-0000000020")
    assert (found.model.adapter, found.model.adapter_rank) == ("dora", 2)


def test_code_that_the_runs_settings_name_is_not_run_unasked(model: Run) -> None:
    model.write_config(model.config.override({"model.source": "mine:Model"}))
    with pytest.raises(ConfigError, match=r"config\.yaml.*--trust-code|--trust-code.*config\.yaml"):
        parsed("--recipe", "sft", "--train.start-from", model.folder.url)


def test_a_missing_model_is_an_error_with_a_remedy(
    model: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that is not there is an error with the way on."""
    assert main(["train", "--recipe", "lora"]) == 2
    assert "springtide train --recipe lora --train.start-from runs/MODEL" in capsys.readouterr().err
    assert main(["train", "--recipe", "lora", "--train.start-from", str(tmp_path / "nothing")]) == 2
    assert "config.yaml; " in capsys.readouterr().err
    assert main(["data", "prepare", "--recipe", "sft", "--train.start-from", model.folder.url]) == 2
    assert "corpus.source = ''" in capsys.readouterr().err
