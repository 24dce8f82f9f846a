"""Runs that are kept near the weights that they start from have the same bits at any world size, through resizes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from loops import every_tensor, train, train_and_write, train_each_until
from ranks import run_here

from springtide.checkpoint.format import committed
from springtide.cli.main import main
from springtide.config import Config, dump
from springtide.errors import CheckpointError, ConfigError
from springtide.events import Event, Started, StepDone
from springtide.run.fisher import anchored as fisher_anchored
from springtide.run.fisher import write_fisher
from springtide.run.folder import open_run
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.training.start_check import check_adapter, check_start, check_tensors

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
STEPS = 6


@pytest.fixture
def trunk(tiny: Config) -> Config:
    """A finished run of three steps; below its root also its Fisher, ``fisher``."""
    step = tiny.tokens_per_step
    fixed = {"run.id": "trunk", "parallel.reduction": "fp64", "stream.lanes": 6, "train.eval_tokens": 0}
    fixed |= {"train.sample_tokens": 0, "elastic.compare": 0, "elastic.recheck": 0, "checkpoint.stage": ""}
    trunk = tiny.override({**fixed, "train.total": 3 * step, "optim.warmup": 0, "optim.peak_lr": 1e-2})
    run_here(train_and_write, trunk)
    root = trunk.run.root
    write_fisher(open_run(f"{root}/trunk"), f"{root}/fisher", tokens=20 * trunk.shards.sequence_length)
    return trunk


def anchored(trunk: Config, name: str, anchor: str, **changes: Any) -> Config:
    """A run of other rows that begins with the weights of ``trunk``."""
    root = trunk.run.root
    begins = {"train.start_from": f"{root}/trunk/checkpoints/step-0000000003", "train.start_with": "weights"}
    fixed = {"run.id": name, "train.total": STEPS * trunk.tokens_per_step, "stream.seed": 1}
    fixed |= {"checkpoint.every_steps": 3, "objective.anchor": anchor.replace("ROOT", root)}
    weights = {"objective.anchor_weight": 1.0 if anchor == "l2sp" else 100.0}
    return trunk.override({**begins, **fixed, **weights, **{key.replace("__", "."): changes[key] for key in changes}})


def steps(events: list[Event]) -> list[StepDone]:
    return [event for event in events if isinstance(event, StepDone)]


def test_resizes_and_restores_leave_no_trace(trunk: Config, ranks: Ranks) -> None:
    """With both anchors; and layouts whose copies each hold the whole penalty count it once."""
    anchors = ("l2sp", "ROOT/fisher")
    resized = [anchored(trunk, f"resized-{number}", anchor) for number, anchor in enumerate(anchors)]
    layouts = [
        anchored(
            trunk,
            strategy,
            "ROOT/fisher",
            parallel__strategy=strategy,
            parallel__reduction="fp32",
            checkpoint__every_steps=0,
        )
        for strategy in ("zero3", "ddp")
    ]
    first, *_ = ranks(2, train_each_until, [*resized, *layouts], 2)
    second, *_ = ranks(3, train_each_until, resized, 4)
    for number, anchor in enumerate(anchors):
        third = run_here(train, resized[number])
        found: list[StepDone] = []
        for events in (first[number], second[number], third):
            assert isinstance(events[0], Started)
            assert events[0].step == len(found)
            found += steps(events)
        whole = anchored(trunk, f"whole-{number}", anchor)
        expected = steps(run_here(train, whole))
        assert [step.loss for step in found] == [step.loss for step in expected]
        state, other = run_here(every_tensor, whole), run_here(every_tensor, resized[number])
        assert other.keys() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(other[name], tensor), name
        penalties = [step.extra["anchor_penalty"] for step in expected]
        assert penalties[0] == 0.0 < min(penalties[1:])
        assert [step.extra["anchor_penalty"] for step in found] == pytest.approx(penalties, rel=1e-12)
    for events in first[len(anchors) :]:
        for field in ("loss", "grad_norm"):
            wanted = [getattr(step, field) for step in expected]
            assert [getattr(step, field) for step in steps(events)] == pytest.approx(wanted, rel=1e-3)
        assert [step.extra["anchor_penalty"] for step in steps(events)] == pytest.approx(penalties, rel=1e-2)
    free = steps(run_here(train, anchored(trunk, "free", "")))
    assert (free[0].loss, free[0].grad_norm) == (expected[0].loss, expected[0].grad_norm), "at w0 it pulls nowhere"
    assert free[-1].loss != expected[-1].loss
    assert "anchor_penalty" not in free[-1].extra


def test_what_cannot_begin_says_so(trunk: Config) -> None:
    data, root = open_data(trunk.data), trunk.run.root
    good = anchored(trunk, "good", "ROOT/fisher")
    check_tensors(good, data)
    with pytest.raises(ConfigError, match=r"objective.anchor = 'l2sp'.*train.start_from names none"):
        check_adapter(trunk.override({"objective.anchor": "l2sp"}))
    with pytest.raises(ConfigError, match=r"model.adapter = 'lora' keeps as they are"):
        check_adapter(good.override({"model.adapter": "lora"}))
    with pytest.raises(ConfigError, match=r"objective\.anchor = .*not of Fisher"):
        check_tensors(good.override({"objective.anchor": f"{root}/trunk"}), data)
    with pytest.raises(ConfigError, match="nothing is committed there"):
        check_tensors(good.override({"objective.anchor": f"{root}/nothing"}), data)
    begins = {"train.start_from": f"{root}/fisher/checkpoints/step-0000000003", "objective.anchor": ""}
    with pytest.raises(ConfigError, match="holds a Fisher and no weights"):
        check_start(good.override(begins), data.order.identity_at, data.tokenizer_digest)
    other = anchored(trunk, "other", "")
    run_here(train, other)
    there = f"{root}/other/checkpoints/{committed(Folder(f'{root}/other'))[-1]}"
    with pytest.raises(
        ConfigError, match=r"is of .*trunk/checkpoints/step-0000000003, and the run starts from .*other"
    ):
        check_tensors(good.override({"train.start_from": there}), data)
    with pytest.raises(ConfigError, match="is not empty"):
        write_fisher(open_run(f"{root}/trunk"), f"{root}/fisher", tokens=64)

    # while a run trains: its origin vanishes, comes back, and the Fisher is another one
    origin, fisher = Folder(f"{root}/trunk"), Folder(f"{root}/fisher")
    run_here(train, good, 4)
    shutil.move(origin.where("checkpoints"), origin.where("away"))
    with pytest.raises(ConfigError, match=r"train.start_from = .*read at every start while objective.anchor is set"):
        run_here(train, good)
    shutil.move(origin.where("away"), origin.where("checkpoints"))
    shutil.rmtree(fisher.where(""))
    write_fisher(open_run(origin.url), fisher.url, tokens=30 * trunk.shards.sequence_length)
    with pytest.raises(CheckpointError, match=r"until step 4 and is .* now: objective.anchor would pull elsewhere"):
        run_here(train, good)


def test_train_computes_the_fisher_that_it_is_anchored_to(trunk: Config, capsys: pytest.CaptureFixture[str]) -> None:
    config = anchored(trunk, "other", "")
    file = Path(trunk.run.root, "other.yaml")
    file.write_text(dump(config))
    command = ["train", str(file), "--fisher-tokens", "64"]
    assert main([*command, "--dry-run"]) == 0
    url = yaml.safe_load(capsys.readouterr().out)["objective"]["anchor"]
    [name] = committed(Folder(url))
    written = Path(url, "checkpoints", name).stat().st_mtime_ns
    assert fisher_anchored(config, 64).objective.anchor == url
    assert Path(url, "checkpoints", name).stat().st_mtime_ns == written, "computed once"
    assert fisher_anchored(config, 128).objective.anchor != url
    shutil.rmtree(Path(url, "checkpoints", name))  # as a call that was killed leaves it, or that is under way
    again = fisher_anchored(config, 64)
    assert again.objective.anchor != url
    assert committed(Folder(again.objective.anchor)) == [name]
    assert again.train.start_from.endswith("/checkpoints/step-0000000003")
    url = again.objective.anchor
    with pytest.raises(ConfigError, match=r"objective\.anchor = l2sp"):
        fisher_anchored(config.override({"objective.anchor": "l2sp"}), 64)
    with pytest.raises(ConfigError, match=r"train\.start_from is empty"):
        fisher_anchored(trunk, 64)
    there = Folder(trunk.run.root).names()
    assert main([*command[:-1], "96", "--run.id", "trunk"]) == 3
    assert "run.id" in capsys.readouterr().err
    assert main([*command[:-1], "96", "--model.adapter", "lora"]) == 2
    assert "objective.anchor" in capsys.readouterr().err
    assert Folder(trunk.run.root).names() == there, "nothing is computed for a run that is refused"
    assert main(["train", str(file), "--fisher-dataset", trunk.shards.dataset]) == 2
    assert "give --fisher-tokens" in capsys.readouterr().err
    run_here(train_and_write, config.override({"objective.anchor": url}))
    assert fisher_anchored(config, 128, resume=True).objective.anchor == url, "a run goes on with its own"
    run_here(train_and_write, config.override({"run.id": "without"}))
    with pytest.raises(ConfigError, match="has no anchor"):
        fisher_anchored(config.override({"run.id": "without"}), 64, resume=True)
