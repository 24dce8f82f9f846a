"""Only adapters learn, with the same bits at any world size, through resizes and restores. DoRA does all that LoRA does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import every_tensor, train

from springtide.checkpoint.format import committed, read_manifest
from springtide.checkpoint.load import read_pieces
from springtide.config import Config
from springtide.errors import ConfigError
from springtide.events import Evaluated, Event, Started, StepDone
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.training.evaluate import evaluate_checkpoint
from springtide.training.start_check import check_tensors

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
STEPS = 6
ADAPTER = (".lora_a", ".lora_b", ".magnitude")


def base(tiny: Config) -> Config:
    """A short run whose results have the same bits at any world size."""
    step = tiny.tokens_per_step
    fixed = {"run.id": "base", "parallel.reduction": "fp64", "stream.lanes": 6, "train.eval_tokens": 0}
    return tiny.override({**fixed, "train.total": 2 * step, "optim.warmup": 0})


def adapted(config: Config, name: str, **changes: Any) -> Config:
    fixed = {"run.id": name, "train.start_from": f"{config.run.root}/base/checkpoints/step-0000000002"}
    fixed |= {"train.start_with": "weights", "train.total": STEPS * config.tokens_per_step, "optim.peak_lr": 1e-2}
    fixed |= {"model.adapter": "lora", "model.adapter_rank": 4, "checkpoint.every_steps": 3}
    return config.override({**fixed, **{key.replace("__", "."): value for key, value in changes.items()}})


def losses(events: list[Event]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, StepDone)}


@pytest.mark.full
def test_only_adapters_learn_and_resizes_leave_no_trace(tiny: Config, ranks: Ranks) -> None:
    """The targets are those of one layer's attention and the other's feed-forward, so units hold different adapters."""
    trunk = base(tiny).override({"checkpoint.stage": "/dev/shm"})
    ranks(2, train, trunk)
    [before] = ranks(1, every_tensor, trunk)
    targets = ["blocks.0.attention.*", "blocks.1.ffn.*"]
    own = {"model__adapter": "dora", "model__adapter_targets": targets, "optim__ema_half_life": 2000}
    whole = adapted(trunk, "whole", **own)
    expected = losses(ranks(1, train, whole)[0])
    resized = adapted(trunk, "resized", **own, train__eval_tokens=6 * tiny.shards.sequence_length)
    found: dict[int, float] = {}
    for world_size, stop_at in ((2, 2), (5, 4), (3, 0)):
        events = ranks(world_size, train, resized, stop_at)[0]
        assert isinstance(events[0], Started)
        assert events[0].step == len(found)
        found |= losses(events)
    assert found == expected
    [state], [other] = ranks(1, every_tensor, whole), ranks(1, every_tensor, resized)
    assert other.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(other[name], tensor), name
    adapters = {name.removeprefix("model/") for name in state if name.endswith(ADAPTER)}
    assert len(adapters) == 7 * 3
    for name, tensor in before.items():
        if name.startswith("model/"):
            assert torch.equal(state[name], tensor), f"{name} is frozen"
    assert {name.split("/")[1] for name in state if name.startswith("optim/")} == adapters
    folder = Folder(whole.run.root) / "whole"
    again = read_pieces(folder, committed(folder)[-1], read_manifest(folder, committed(folder)[-1]))
    frozen = [
        one for one in again if one.tensor.startswith("model/") and one.tensor.removeprefix("model/") not in adapters
    ]
    assert {one.file.split("/")[0] for one in frozen} == {committed(folder)[0]}, "what is frozen is written once"
    moved = [name for name in adapters if name.endswith(".lora_b")]
    assert all(state[f"model/{name}"].abs().max() > 0 for name in moved)
    [last] = [event for event in events if isinstance(event, Evaluated) and event.step == STEPS]
    found_again = evaluate_checkpoint(Folder(resized.run.root) / "resized", resized, f"step-{STEPS:010d}")
    assert found_again.heldout_loss == pytest.approx(last.heldout_loss, abs=1e-5)


def test_a_new_adapter_changes_nothing_and_sharded_layouts_learn_the_same(tiny: Config, ranks: Ranks) -> None:
    trunk = base(tiny)
    ranks(1, train, trunk)
    layout = {"parallel__reduction": "fp32", "model__adapter": "dora"}
    layout["train__eval_tokens"] = 6 * tiny.shards.sequence_length
    one = adapted(trunk, "one", **layout)
    expected = ranks(1, train, one)[0]
    [first] = [event for event in expected if isinstance(event, Evaluated) and event.step == 0]
    there = Folder(trunk.run.root) / "base"
    plain = evaluate_checkpoint(
        there, trunk.override({"train.eval_tokens": layout["train__eval_tokens"]}), committed(there)[-1]
    )
    assert first.heldout_loss == pytest.approx(plain.heldout_loss, abs=1e-5)
    config = adapted(trunk, "three", parallel__recompute="full", parallel__strategy="zero3", **layout)
    for events in ranks(3, train, config):
        assert losses(events) == pytest.approx(losses(expected), abs=5e-5)


def test_what_cannot_begin_says_so(tiny: Config, ranks: Ranks) -> None:
    trunk = base(tiny)
    ranks(1, train, trunk)
    config = adapted(trunk, "first")
    data = open_data(config.data)
    check_tensors(config, data)
    with pytest.raises(ConfigError, match=r"lacks .*lora_a.*start_with = weights"):
        check_tensors(config.override({"train.start_with": "optimizer"}), data)
    ranks(1, train, config)
    folder = Folder(config.run.root) / "first"
    pieces = read_pieces(folder, committed(folder)[-1], read_manifest(folder, committed(folder)[-1]))
    assert {one.tensor for one in pieces if one.tensor.endswith(".lora_a")}
    second = adapted(trunk, "second", train__start_from=f"{folder.url}/checkpoints/{committed(folder)[-1]}")
    check_tensors(second, data)  # goes on with the adapter that is there
    with pytest.raises(ConfigError, match=r"lora_a is F32 \(4, 64\) there and F32 \(8, 64\) here"):
        check_tensors(second.override({"model.adapter_rank": 8}), data)
    with pytest.raises(ConfigError, match="has no place for"):
        check_tensors(second.override({"model.adapter": "none"}), data)
