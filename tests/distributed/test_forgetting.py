"""A run that starts from another's weights tells how much it forgets of that one's held-out text, across restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
from loops import train, train_and_write, train_as_torchrun_does
from ranks import run_here

from springtide.checkpoint.format import Meta, committed
from springtide.config import Config
from springtide.events import Evaluated, Event
from springtide.run.folder import open_run
from springtide.run.report.run_page import render
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.tracking.timeline import timeline_of
from springtide.training.evaluate import evaluate_checkpoint
from springtide.training.forgetting import FirstLosses, old_names, with_old_sets

pytestmark = pytest.mark.distributed


@pytest.fixture
def trunk(tiny: Config) -> Config:
    """A finished run of 40 steps on code."""
    step = tiny.tokens_per_step
    fixed = {"run.id": "trunk", "train.total": 40 * step, "optim.warmup": 0, "optim.peak_lr": 1e-2}
    fixed |= {"train.sample_tokens": 0, "elastic.compare": 0, "elastic.recheck": 0, "checkpoint.stage": ""}
    trunk = tiny.override({**fixed, "train.eval_tokens": 24 * 64, "stream.max_epochs": 100})
    run_here(train_and_write, trunk)
    return trunk


def continued(trunk: Config, **changes: object) -> Config:
    """A run of ten steps that starts with its weights."""
    begins = {"train.start_from": f"{trunk.run.root}/trunk/checkpoints/step-0000000040", "train.start_with": "weights"}
    fixed = {"run.id": "continued", "train.total": 10 * trunk.tokens_per_step, "train.eval_every": 5}
    return trunk.override({**begins, **fixed, **{key.replace("__", "."): changes[key] for key in changes}})


def evaluated(events: list[Event]) -> list[Evaluated]:
    return [event for event in events if isinstance(event, Evaluated)]


def test_the_sets_of_the_run_before_are_evaluated_and_compared_with_step_0(trunk: Config, poems: str) -> None:
    given = continued(trunk, shards__dataset=poems)
    config, remarks = with_old_sets(given)
    assert remarks == []
    assert config.stream.eval_datasets == {"trunk": trunk.shards.dataset}
    assert with_old_sets(config) == (config, []), "a second start adds nothing"
    first = evaluated(run_here(train, config, 7))
    second = evaluated(run_here(train, config))
    assert [one.step for one in (*first, *second)] == [0, 5, 10]
    assert first[0].forgetting == {"trunk": 0.0}
    origin = evaluate_checkpoint(
        Folder(f"{trunk.run.root}/trunk"), config, committed(Folder(f"{trunk.run.root}/trunk"))[-1]
    )
    assert origin.losses["trunk"] == pytest.approx(first[0].losses["trunk"], abs=1e-5)
    for one in (*first, *second):
        assert one.forgetting == {"trunk": one.losses["trunk"] - first[0].losses["trunk"]}
    assert second[-1].forgetting["trunk"] > 0.05, "it forgets"
    assert f"trunk {second[-1].forgetting['trunk']:+.3f}" in second[-1].describe()
    there = Folder(f"{trunk.run.root}/continued")
    again = evaluate_checkpoint(there, config, committed(there)[-1])
    assert again.forgetting["trunk"] == pytest.approx(second[-1].forgetting["trunk"], abs=1e-5)
    assert evaluate_checkpoint(there, config.override({"train.eval_tokens": 64}), committed(there)[-1]).forgetting == {}
    page = render("continued", timeline_of([*first, *second]))
    assert "<h2>Forgetting</h2>" in page
    assert f'<td class="number">{second[-1].forgetting["trunk"]:+.3f}</td>' in page
    assert "Forgetting" not in render("trunk", timeline_of([origin]))


def test_replay_compares_the_old_corpus_of_the_mixture(trunk: Config, poems: str) -> None:
    mixture = {"new": poems, "old": trunk.shards.dataset}
    config = continued(trunk, stream__mixture=mixture, stream__weights=[{"shares": {"new": 3, "old": 1}}])
    assert with_old_sets(config) == (config, [])
    assert old_names(config, open_data(config.data)) == ["old"]
    run_here(train_as_torchrun_does, config)
    replayed = open_run(f"{config.run.root}/continued").evaluations
    assert [list(one.forgetting) for one in replayed] == [["old"]] * 3
    alone = continued(trunk, run__id="alone", shards__dataset=poems)
    run_here(train_as_torchrun_does, alone)
    run = open_run(f"{config.run.root}/alone")
    assert run.config.stream.eval_datasets == {"trunk": trunk.shards.dataset}
    assert run.has_nothing_left(alone.override({"run.id": "alone"})), "the given config has no such datasets"
    assert replayed[-1].forgetting["old"] < run.evaluations[-1].forgetting["trunk"]
    third = continued(trunk, run__id="third", train__start_from=f"{config.run.root}/alone/checkpoints/step-0000000010")
    chained, _ = with_old_sets(third.override({"shards.dataset": poems}))
    assert chained.stream.eval_datasets == {"trunk": trunk.shards.dataset}, "also of the run before that one"


def test_what_cannot_be_measured_is_told(trunk: Config, poems: str, tmp_path: Path) -> None:
    branch = continued(trunk, train__start_with="state", train__total=50 * trunk.tokens_per_step)
    assert with_old_sets(branch) == (branch, [])
    assert with_old_sets(continued(trunk, train__eval_tokens=0))[1] == []
    taken = continued(trunk, stream__mixture={"trunk": poems})
    assert with_old_sets(taken)[0].stream.eval_datasets == {"trunk-trunk": trunk.shards.dataset}
    away = Path(trunk.shards.dataset)
    away.rename(tmp_path / "away")
    try:
        config, [remark] = with_old_sets(continued(trunk, shards__dataset=poems))
    finally:
        (tmp_path / "away").rename(away)
    assert config.stream.eval_datasets == {}
    assert remark.startswith(f"what this run forgets of {trunk.shards.dataset} is not measured: ")


@pytest.mark.parametrize(
    "component",
    [None, 7, {"losses": 3, "rows": 4}, {"losses": {"a": "b"}, "rows": 4}, {"losses": {"a": 1.0}}, {"rows": 4}],
    ids=str,
)
def test_a_checkpoint_that_makes_no_sense_compares_nothing(component: object) -> None:
    meta = Meta(
        step=1, tokens=1, world_size=1, order_identity="", config_fingerprint="", components={"forgetting": component}
    )
    assert FirstLosses.in_state(meta).losses == {}
