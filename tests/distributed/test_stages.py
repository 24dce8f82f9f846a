"""A second stage: longer rows of another dataset, with the optimizer's state of the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import full_state, save_weights_alone, train, train_as_torchrun_does
from prepared import prepare

from springtide import config as configs
from springtide.api.resolve import _branched
from springtide.checkpoint import branch
from springtide.checkpoint.format import read_manifest
from springtide.config import Config
from springtide.errors import ConfigError
from springtide.events import Event, Started, StepDone
from springtide.run.find import find_run
from springtide.run.folder import open_run
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.training.start_check import check_start, check_tensors
from springtide.training.state import rate_after

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
SHORT, LONG = 256, 1024
YARN = {
    "model__window": 200,
    "model__global_every": 2,
    "model__rope_scaling": "yarn",
    "model__rope_factor": 4.0,
    "model__rope_original_length": SHORT,
}
FIRST, SECOND = 8, 6
"""Steps of each stage."""


@pytest.fixture
def first(tiny: Config) -> Config:
    """The first stage: six rows of 256 tokens a step."""
    fixed = {"shards.dataset": "", "shards.sequence_length": SHORT, "stream.global_batch": 6, "train.eval_tokens": 0}
    fixed |= {"train.total": FIRST * 6 * SHORT, "optim.warmup": 2 * 6 * SHORT, "optim.ema_half_life": 4 * 6 * SHORT}
    fixed |= {"optim.schedule": "wsd", "optim.decay": 1, "parallel.reduction": "fp64", "elastic.recheck": 0}
    return prepare(tiny.override({**fixed, "train.sample_tokens": 0, "checkpoint.every_steps": 0, "run.id": "first"}))


def second(first: Config, trunk: str, **changes: Any) -> Config:
    """The second stage: three rows of 1,024 tokens of other text a step, which goes on from the run ``trunk``."""
    fixed = {"shards.dataset": "", "shards.sequence_length": LONG, "stream.global_batch": 3, "stream.seed": 3}
    fixed |= {"train.total": SECOND * 3 * LONG, "optim.warmup": 0, "optim.decay": 2 * 3 * LONG, "corpus.max_files": 60}
    fixed |= {"train.start_from": f"{first.run.root}/{trunk}", "train.start_with": "optimizer", "run.id": "second"}
    return prepare(first.override({**fixed, **{key.replace("__", "."): value for key, value in changes.items()}}))


def begun(config: Config) -> Config:
    """As the driver does: claimed, what it begins with found, checked and held."""
    config, run = find_run(config, resume=False, accept_changes=False)
    data = open_data(config.data)
    check_start(config, data.order.identity_at, data.tokenizer_digest)
    check_tensors(config, data)
    branch.keep(config.train.start_from, run.id)
    run.folder.write(configs.RUN_CONFIG, configs.dump(config))
    return config


def resolved(config: Config) -> Config:
    return config.override({"train.start_from": branch.resolve(config.train.start_from, "")})


def steps(events: list[Event]) -> dict[int, StepDone]:
    return {event.step: event for event in events if isinstance(event, StepDone)}


def resized(ranks: Ranks, config: Config, sizes: list[tuple[int, int]]) -> dict[int, StepDone]:
    """The steps of a run that is stopped after some of them, and goes on at another world size: (ranks, until)."""
    done: dict[int, StepDone] = {}
    for world_size, until in sizes:
        found = ranks(world_size, train, config, until)[0]
        [started] = [event for event in found if isinstance(event, Started)]
        assert started.step == max(done, default=0)
        done |= steps(found)
    return done


def named(config: Config, name: str) -> Config:
    return config.override({"run.id": name})


@pytest.mark.full
def test_two_stages_resized_in_both_are_bit_equal_to_undisturbed_ones(first: Config, ranks: Ranks) -> None:
    root = Folder(first.run.root)
    whole = resized(ranks, named(first, "twin"), [(1, 0)])
    assert resized(ranks, first, [(1, 3), (2, 6), (3, 0)]).keys() == whole.keys()
    ahead = begun(named(second(first, "twin", **YARN), "twin-2"))
    config = begun(second(first, "first", **YARN))
    assert config.train.start_from == f"{root.url}/first/checkpoints/step-{FIRST:010d}"
    expected = resized(ranks, ahead, [(1, 0)])
    found = resized(ranks, config, [(2, 2), (3, 4), (1, 0)])
    assert sorted(found) == list(range(1, SECOND + 1))
    for step, done in found.items():
        assert (done.loss, done.learning_rate, done.digest, done.tokens) == (
            expected[step].loss,
            expected[step].learning_rate,
            expected[step].digest,
            step * 3 * LONG,
        )
    states = [ranks(1, full_state, one)[0] for one in (ahead, config)]
    assert int(states[1]["embedding.weight/step"]) == FIRST + SECOND
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor), name

    # the chain goes on from the first stage's, and so does the proof
    metas = [read_manifest(root / name, f"step-{SECOND:010d}").meta for name in ("twin-2", "second")]
    assert metas[0].chain == metas[1].chain
    assert metas[1].components["stages_before"] == {"tokens": FIRST * 6 * SHORT}
    proof = open_run(f"{root.url}/second").verify()
    assert proof.ok
    assert (proof.steps_proven_by_chain, proof.goes_on_from) == (SECOND, config.train.start_from)
    # a stage of another first one would have another chain
    torn = configs.parse(root.read("second/config.yaml"), "").override({"train.start_with": "weights"})
    (root / "second").write(configs.RUN_CONFIG, configs.dump(torn))
    assert not open_run(f"{root.url}/second").verify().ok


def test_the_schedule_begins_anew_or_goes_on(first: Config) -> None:
    begins = second(first, "first")
    assert rate_after(begins, 1) == begins.optim.peak_lr
    half = begins.override({"optim.schedule": "linear", "optim.decay": 0, "optim.final_lr_ratio": 0.0})
    before = first.tokens_after(FIRST)
    goes_on = half.override({"optim.schedule_begin": before})
    total = before + half.tokens_after(SECOND)
    for step in range(1, SECOND + 1):
        left = (total - before - step * 3 * LONG) / total
        assert rate_after(goes_on, step) == pytest.approx(half.optim.peak_lr * left)
        assert rate_after(half, step) == pytest.approx(half.optim.peak_lr * (1 - step / SECOND))


def test_what_a_stage_cannot_go_on_from_is_told_before_anything_is_written(
    first: Config, ranks: Ranks, tmp_path: Path
) -> None:
    ranks(1, train, first.override({"train.total": 6 * SHORT, "optim.warmup": 0, "optim.ema_half_life": 0}))
    bpe = {"corpus__tokenizer": "bpe", "corpus__vocab_size": 300, "shards__root": str(tmp_path / "other")}
    for changes, problem in (
        (bpe, "was trained with the tokenizer .*; prepare the new text with corpus.tokenizer = "),
        ({"model__ffn_dim": 128}, r"ffn.down.weight is F32 \(64, 160\) there and F32 \(64, 128\) here"),
        ({"model__num_layers": 3}, "the checkpoint lacks model/blocks.2.*or train.start_with = weights"),
        ({"optim__optimizer": "muon"}, "the checkpoint lacks optim/.*momentum.*or train.start_with = weights"),
        ({"train__start_with": "state"}, "was trained in the order .*or train.start_with = optimizer or weights"),
    ):
        with pytest.raises(ConfigError, match=rf"train\.start_from = .*{problem}"):
            begun(second(first, "first", **changes))
        assert not (Folder(first.run.root) / "second").names()
    wider = named(second(first, "first", model__ffn_dim=128), "torchrun")
    with pytest.raises(AssertionError, match=r"ffn\.down\.weight is F32"):
        ranks(2, train_as_torchrun_does, resolved(wider))
    assert not (Folder(first.run.root) / "torchrun").names()
    # averages begin with the weights, so a first stage need not have any; nor need it keep any
    slower = begun(named(second(first, "first", optim__peak_lr=1e-3), "averaged"))
    assert _branched(slower, open_data(slower.data)) == [
        f"the learning rate of step 1 was 0.0003 in {slower.train.start_from}; this run begins with 0.001"
    ]


def test_a_checkpoint_without_the_optimizers_state_is_refused(first: Config, ranks: Ranks) -> None:
    ranks(1, save_weights_alone, first)
    config = second(first, "first")
    with pytest.raises(ConfigError, match=r"has no state of an optimizer; .*train\.start_with = weights"):
        begun(config)
    assert not (Folder(first.run.root) / "second").names()
    begun(config.override({"train.start_with": "weights"}))
