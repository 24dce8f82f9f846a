"""Optimizers, parameter groups and averaged weights: the same bits at any world size, through any resize and restore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import every_tensor, train

from springtide.config import Config
from springtide.events import Evaluated, Event, Started, StepDone
from springtide.storage import Folder
from springtide.training.evaluate import evaluate_checkpoint

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
STEPS = 8
FROZEN = "blocks.0.ffn.gate.weight"


def exact(tiny: Config, name: str, **changes: Any) -> Config:
    """A short run whose results have the same bits at any world size."""
    step = tiny.tokens_per_step
    groups = [
        {"match": FROZEN, "frozen": True},
        {"match": "embedding.*", "weight_decay": 0.0},
        {"match": "blocks.1.*", "lr_scale": 0.5},
    ]
    fixed = {"run.id": name, "parallel.reduction": "fp64", "stream.lanes": 6, "train.eval_tokens": 0}
    fixed |= {"train.total": STEPS * step, "optim.warmup": 2 * step, "optim.groups": groups}
    fixed |= {"optim.schedule": "wsd_sqrt", "optim.final_lr_ratio": 0.0, "optim.ema_half_life": 5 * step}
    return tiny.override({**fixed, **{key.replace("__", "."): value for key, value in changes.items()}})


def losses(events: list[Event]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, StepDone)}


@pytest.mark.parametrize("kind", ["muon", pytest.param("lamb", marks=pytest.mark.full)])
@pytest.mark.full
def test_averages_frozen_weights_and_every_optimizer_are_bit_equal_through_resizes(
    tiny: Config, ranks: Ranks, kind: str
) -> None:
    """Only the resized run evaluates, with the averages in the place of the weights meanwhile: that leaves no trace either."""
    config = exact(tiny, f"{kind}-whole", optim__optimizer=kind)
    expected = losses(ranks(1, train, config)[0])
    resized = exact(
        tiny,
        f"{kind}-resized",
        optim__optimizer=kind,
        train__eval_tokens=6 * tiny.shards.sequence_length,
        train__eval_every=4,
    )
    found: dict[int, float] = {}
    for world_size, stop_at in ((2, 3), (5, 5), (3, 0)):
        events = ranks(world_size, train, resized, stop_at)[0]
        assert isinstance(events[0], Started)
        assert events[0].step == len(found)
        found |= losses(events)
    assert found == expected
    [state] = ranks(1, every_tensor, config)
    averaged = {name for name in state if name.endswith("/ema")}
    weights = {name for name in state if name.startswith("model/")}
    assert {f"optim/{name.removeprefix('model/')}/ema" for name in weights - {f"model/{FROZEN}"}} == averaged
    for other in ranks(2, every_tensor, resized):
        assert other.keys() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(other[name], tensor), name
    assert not any(name.startswith(f"optim/{FROZEN}/") for name in state)
    [last] = [event for event in events if isinstance(event, Evaluated) and event.step == STEPS]
    again = evaluate_checkpoint(Folder(config.run.root) / resized.run.id, resized, f"step-{STEPS:010d}")
    assert last.ema_heldout_loss == pytest.approx(again.ema_heldout_loss, abs=1e-5)
    assert abs(again.heldout_loss - (again.ema_heldout_loss or 0.0)) > 1e-4


def test_sharded_layouts_with_groups_learn_what_one_worker_does(tiny: Config, ranks: Ranks) -> None:
    """Weights that are sharded, gathered a block at a time, and partly frozen; a branch then leaves the averages out."""
    layout = {
        "parallel__reduction": "fp32",
        "optim__optimizer": "lamb",
        "train__eval_tokens": 6 * tiny.shards.sequence_length,
    }
    expected = ranks(1, train, exact(tiny, "sharded-1", **layout))[0]
    config = exact(tiny, "sharded-3", parallel__recompute="full", **layout)
    for events in ranks(3, train, config):
        assert losses(events) == pytest.approx(losses(expected), abs=5e-5)
        found, wanted = (
            [one.ema_heldout_loss for one in each if isinstance(one, Evaluated)] for each in (events, expected)
        )
        assert found == pytest.approx(wanted, abs=5e-5)
        assert found[0] is None, "before the first step there is nothing to average"
    trunk = f"{config.run.root}/sharded-3/checkpoints/step-{STEPS:010d}"
    branch = exact(tiny, "branch", optim__ema_half_life=0, train__start_from=trunk, **layout)
    for names in ranks(2, every_tensor, branch):
        assert not any(name.endswith("/ema") for name in names)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"optimizer": "adafactor"}, marks=pytest.mark.full),
        pytest.param({"moments": "bf16"}, marks=pytest.mark.full),
        {"moments": "int8"},
    ],
    ids=str,
)
@pytest.mark.full
def test_small_states_saved_by_two_workers_go_on_with_three(
    tiny: Config, ranks: Ranks, changes: dict[str, str]
) -> None:
    named = {f"optim__{field}": value for field, value in changes.items()}
    whole = exact(tiny, "small-whole", **named)
    expected = losses(ranks(1, train, whole)[0])
    resized = exact(tiny, "small-resized", **named)
    found = losses(ranks(2, train, resized, 4)[0]) | losses(ranks(3, train, resized)[0])
    assert found == expected
    [state] = ranks(1, every_tensor, whole)
    [other] = ranks(1, every_tensor, resized)
    assert other.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(other[name], tensor), name
