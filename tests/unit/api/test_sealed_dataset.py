"""A run that resumes reads the dataset that it began with, whatever its corpus looks like now."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from springtide.api.prepare import as_begun, prepare
from springtide.api.resolve import absolute, resolve
from springtide.checkpoint import leases
from springtide.checkpoint.commit import CommitJob, PieceWriter
from springtide.checkpoint.format import Meta
from springtide.checkpoint.retention import Rule
from springtide.config import Config
from springtide.errors import CheckpointError, CorpusError, RunExists
from springtide.ray.cluster import session
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.stream import open_data


class Resolved(Exception):
    """Everything is decided but what the cluster decides. Argument: the config."""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop where a cluster would be connected."""

    @contextlib.contextmanager
    def stop(config: Config, dashboard: bool) -> Iterator[str]:
        raise Resolved(config)
        yield ""

    monkeypatch.setattr(session, "cluster", stop)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of text."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(f"word{number * word % 997}" for word in range(400)))
    return folder


@pytest.fixture
def given(tiny: Config, text: Path) -> Config:
    """What the user gives at each start: it names no dataset."""
    changes = {"corpus.source": str(text), "shards.dataset": "", "run.id": "mine", "corpus.max_files": 0}
    return tiny.override(changes)


def begun(given: Config, **changes: Any) -> Run:
    """The run after five steps, with a checkpoint."""
    config = prepare(absolute(given))
    run, data = Run(Folder(config.run.root) / config.run.id), open_data(config.data)
    run.write_config(config)
    meta = Meta(step=5, tokens=1, world_size=1, order_identity=data.order.identity_at(5), config_fingerprint="c")
    job = CommitJob(
        run.folder.url, leases.claim(run.folder, "me").term, 0, meta, config.model_dump(mode="json"), [], Rule(3)
    )
    PieceWriter(run.folder).write(job, lambda _: memoryview(b""), lambda: False)
    leases.end(run.folder, 1)
    return run


def resumed(config: Config, **how: Any) -> Config:
    """The config under which the run would resume."""
    with pytest.raises(Resolved) as found:
        resolve(config, resume=True, **how)
    decided: Config = found.value.args[0]
    return decided


def grow(text: Path) -> None:
    with (text / "0.txt").open("a") as file:
        file.write("\none more line\n")


def remove(text: Path) -> None:
    shutil.rmtree(text)


@pytest.mark.parametrize("change", [grow, remove])
def test_a_run_resumes_although_its_corpus_has_changed(given: Config, text: Path, change: Any) -> None:
    run = begun(given)
    change(text)
    assert resumed(given).shards.dataset == run.config.shards.dataset


def test_the_user_is_told_that_the_corpus_is_another(given: Config, text: Path) -> None:
    before = begun(given).config
    assert as_begun(given, before) == (before.override({"run.root": given.run.root}), [])
    grow(text)
    _, [said] = as_begun(given, before)
    keeps = f"the run keeps reading the dataset that it began with, {before.shards.dataset}"
    assert said == f"corpus.source makes another dataset now: {keeps}"
    remove(text)
    config, [said] = as_begun(given, before)
    assert config.shards.dataset == before.shards.dataset
    assert said.startswith("corpus.source ")
    assert said.endswith(f"): the run keeps reading the dataset that it began with, {before.shards.dataset}")


def test_a_mixture_resumes_with_the_part_already_prepared(given: Config, text: Path, poems: str) -> None:
    """A run of a mixture resumes with the part that was prepared."""
    mixed = given.override({"stream.mixture": {"old": poems, "new": ""}})
    run = begun(mixed)
    grow(text)
    assert resumed(mixed).stream.mixture == run.config.stream.mixture
    forgotten = mixed.override({"stream.mixture": {}})
    assert resumed(forgotten).stream.mixture == run.config.stream.mixture


def test_what_the_user_names_now_counts(given: Config, text: Path, poems: str) -> None:
    """Other text, by another setting or as a dataset, is another order, which is refused."""
    run = begun(given)
    with pytest.raises(CheckpointError, match="another dataset"):
        resolve(given.override({"shards.dataset": poems}), resume=True)
    other = given.override({"corpus.min_characters": 9})
    with pytest.raises(RunExists, match=r"corpus\.min_characters: 1 -> 9"):
        resolve(other, resume=True)
    with pytest.raises(CheckpointError, match=r"checkpoint of .* order"):
        resolve(other, resume=True, accept_changes=True)
    assert resumed(other, accept_changes=True, from_scratch=True).shards.dataset != run.config.shards.dataset


def test_from_scratch_takes_the_corpus_as_it_is(given: Config, text: Path) -> None:
    run = begun(given)
    grow(text)
    assert resumed(given, from_scratch=True).shards.dataset not in ("", run.config.shards.dataset)


def test_a_lost_dataset_is_prepared_again_from_its_corpus(given: Config, text: Path) -> None:
    """A dataset that is gone is prepared again from the same corpus."""
    run = begun(given)
    shutil.rmtree(run.config.shards.dataset)
    assert resumed(given).shards.dataset == run.config.shards.dataset
    shutil.rmtree(run.config.shards.dataset)
    remove(text)
    with pytest.raises(CorpusError):
        resolve(given, resume=True)
