"""New text joins a run at a resume: prepared as a dataset of its own, and read from a step on that is not trained yet."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loops import train, train_and_write
from prepared import prepare, write_corpus
from ranks import run_here

from springtide.checkpoint.fresh_start import check_order
from springtide.config import Config
from springtide.config.steps import OrderStep
from springtide.errors import CheckpointError, ConfigError
from springtide.events import StepDone
from springtide.run.find import check_taken_up, find_run
from springtide.run.folder import Run
from springtide.stream import open_data
from springtide.stream.chain import corpus_and_row

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
STEPS, KNOWN = 8, 3


def later(tiny: Config, folder: Path) -> str:
    """The URL of a dataset of new text, prepared as docs/how-to/data.md says."""
    write_corpus(folder, 60, seed=1)
    first = tiny.shards.dataset
    new: dict[str, Any] = {"corpus.source": str(folder), "corpus.max_files": 0, "shards.dataset": ""}
    new |= {"corpus.tokenizer": f"{first}/tokenizer.json", "corpus.apart_from": [first]}
    return prepare(tiny.override(new)).shards.dataset


def mixed(config: Config, url: str, from_step: int) -> Config:
    """The config with new text from a step on."""
    weights = [{"shares": {"first": 1}}, {"from_step": from_step, "shares": {"first": 1, "later": 1}}]
    return config.override(
        {"stream.mixture": {"first": config.shards.dataset, "later": url}, "stream.weights": weights}
    )


@pytest.fixture
def config(tiny: Config) -> Config:
    fixed: dict[str, Any] = {"run.id": "mine", "parallel.reduction": "fp64", "train.eval_tokens": 0, "optim.warmup": 0}
    fixed |= {"checkpoint.every_steps": 0, "stream.max_epochs": 100.0, "stream.window": 64}
    return tiny.override({**fixed, "train.total": STEPS * tiny.tokens_per_step})


@pytest.mark.full
def test_a_resume_reads_new_text_from_a_step_on(config: Config, tmp_path: Path, ranks: Ranks) -> None:
    """Prepare, resume with a new mixture, verify: the run is the one that knew of the text from the start."""
    started, run = find_run(config, resume=False, accept_changes=False)
    ranks(2, train_and_write, started, KNOWN)
    url = later(config, tmp_path / "later")
    resumed, _ = find_run(mixed(config, url, KNOWN), resume=True, accept_changes=False)
    data = open_data(resumed.data)
    assert check_order(run.folder, data.order.identity_at, go_back=False)
    ranks(3, train_and_write, resumed)
    found = run.verify()
    assert (found.ok, found.steps_checked, found.steps_proven_by_chain, found.world_sizes) == (
        True,
        STEPS,
        STEPS,
        (2, 3),
    )
    reads = [1 in corpus_and_row(data.order.batch(step))[0] for step in map(OrderStep, range(STEPS))]
    assert reads == [step >= KNOWN for step in range(STEPS)]
    assert found.corpora["later"].rows > 0
    whole = run_here(train, mixed(config, url, KNOWN).override({"run.id": "whole"}))
    assert {one.step: one.loss for one in run.steps} == {
        one.step: one.loss for one in whole if isinstance(one, StepDone)
    }


def test_steps_that_are_trained_take_no_new_text(config: Config, tmp_path: Path) -> None:
    run_here(train_and_write, config, KNOWN)
    resumed, run = find_run(mixed(config, later(config, tmp_path / "later"), KNOWN - 1), True, False)
    with pytest.raises(CheckpointError, match="other weights or skips of steps that are done"):
        check_order(run.folder, open_data(resumed.data).order.identity_at, go_back=False)


def test_a_run_that_took_text_up_names_its_mixture(config: Config, tmp_path: Path) -> None:
    """A run of commit 0ba2dd87 may have taken up datasets: a resume without them is told what to give."""
    run_here(train_and_write, config, KNOWN)
    run = Run(find_run(config, True, False)[1].folder)
    check_taken_up(config, run)
    taken = mixed(config, later(config, tmp_path / "later"), KNOWN)
    run.write_config(taken)
    check_taken_up(config, run)  # a mixture that the user gave is the user's to change
    run.folder.write("followed/0000.json", b"{}")
    check_taken_up(taken, run)
    with pytest.raises(ConfigError, match="lacks 2 of the datasets that mine took up while it was trained") as raised:
        check_taken_up(config, run)
    words = shlex.split(str(raised.value).partition("or add ")[2])
    settings = {name.removeprefix("--"): json.loads(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    assert config.override(settings).stream == taken.stream
