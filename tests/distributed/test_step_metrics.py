"""The largest logit and the gradient noise scale, in every layout, without another collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from loops import train

from springtide.config import Config
from springtide.distributed import World
from springtide.distributed import world as world_of
from springtide.distributed.fsdp import parallelize
from springtide.events import StepDone
from springtide.model import IGNORE_INDEX, LargestLogit, build, skeleton
from springtide.training import StepSetup, Work, train_step
from springtide.training.state import initialize
from springtide.training.step_metrics import NoiseScale, StepMetrics

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
ROWS, LENGTH = 6, 16


def tokens() -> np.ndarray:
    """Few different ids: gradients of different rows point in one direction."""
    found = np.random.default_rng(0).integers(0, 4, (ROWS, LENGTH + 1))
    found[1, 5:] = ~found[1, 5:]  # not predicted: pieces differ in size
    return found


def step(world: World, config: Config, micro_batch: int) -> tuple[dict[str, float], int]:
    """The metrics of one step, and the number of all-reduces outside of the model."""
    world = world_of("cpu", 0, config.parallel.shards)
    model = parallelize(skeleton(config.model, 257), config.parallel, world)
    initialize(model, config.model, 257)
    metrics = StepMetrics(config.train.metrics, model, world) if config.train.metrics else None
    rows = torch.from_numpy(tokens())[world.rank * ROWS // world.size : (world.rank + 1) * ROWS // world.size]
    slices = [slice(begin, begin + micro_batch) for begin in range(0, len(rows), micro_batch)]
    calls, before = [], dist.all_reduce

    def count(values: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        calls.append(values)
        return before(values, *arguments, **named)

    dist.all_reduce = count
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        parts = [metrics] if metrics else []
        setup = StepSetup(model, optimizer, world, clip_norm=1.0, parts=parts)
        found = train_step(setup, Work(rows, slices, ROWS * LENGTH))
    finally:
        dist.all_reduce = before
    return found.extra, sum(values.dtype == torch.float64 and values.dim() == 2 for values in calls)


def gradient(config: Config, rows: torch.Tensor) -> tuple[torch.Tensor, int, float]:
    """The gradient of the loss summed over the tokens of rows, their number, and the largest logit."""
    model = build(config.model, 257)
    targets = rows[:, 1:].masked_fill(rows[:, 1:] < 0, IGNORE_INDEX)
    logits = model(torch.where(rows[:, :-1] < 0, ~rows[:, :-1], rows[:, :-1])).flatten(0, 1)
    counts = targets.flatten() != IGNORE_INDEX
    torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum").backward()
    each = [one.grad.double().flatten() for one in model.parameters() if one.grad is not None]
    return torch.cat(each), int(counts.sum()), float(logits[counts].max().detach())


@pytest.mark.parametrize(
    ("size", "strategy", "reduction", "pieces"),
    [
        (1, "zero3", "fp32", [[0, 2], None]),
        (2, "zero3", "fp32", [[0, 2], [2, 3], [3, 5], [5, 6]]),
        (2, "ddp", "fp32", [[0, 3], [3, 6]]),
        (3, "zero3", "fp64", [[0, 2], [2, 4], [4, 6]]),
    ],
)
def test_they_are_those_of_the_gradients_of_the_pieces(
    tiny: Config, ranks: Ranks, size: int, strategy: str, reduction: str, pieces: list[Any]
) -> None:
    changes = {"parallel.strategy": strategy, "parallel.reduction": reduction}
    config = tiny.override({**changes, "train.metrics": ["largest_logit", "noise_scale"]})
    rows = torch.from_numpy(tokens())
    whole, num_tokens, largest = gradient(config, rows)
    found = [gradient(config, rows[slice(*piece)])[:2] for piece in pieces if piece]
    squares = sum(float(one.square().sum()) for one, _ in found)
    counts = [count for _, count in found]
    expected = NoiseScale().after(
        squares, sum(count**2 for count in counts), sum(counts), float(whole.square().sum()), num_tokens
    )
    assert expected is not None
    for extra, num_messages in ranks(size, step, config, 2):
        assert extra["noise_scale"] == pytest.approx(expected, rel=1e-3)
        assert extra["largest_logit"] == pytest.approx(largest, abs=1e-5)
        assert num_messages == 1, "the step's own all-reduce"


@pytest.mark.full
def test_off_they_cost_nothing_and_one_piece_tells_no_noise(tiny: Config, ranks: Ranks) -> None:
    step_tokens = tiny.tokens_per_step
    changes = {"run.id": "told", "train.total": 3 * step_tokens, "train.eval_tokens": 0, "parallel.reduction": "fp64"}
    changes |= {"optim.warmup": step_tokens, "stream.lanes": 6}
    both = tiny.override({**changes, "train.metrics": ["largest_logit", "noise_scale"]})
    [alone] = ranks(1, train, both)
    told = [one.extra for one in alone if isinstance(one, StepDone)]
    assert [one.keys() for one in told] == [{"largest_logit"}] * 3, "exact sums of one rank are one piece"
    for events in ranks(2, train, both.override({"run.id": "told-2"})):
        steps = [one for one in events if isinstance(one, StepDone)]
        assert [one.extra["largest_logit"] for one in steps] == [one["largest_logit"] for one in told]
    [plain] = ranks(1, train, both.override({"run.id": "off", "train.metrics": []}))
    assert [one.extra for one in plain if isinstance(one, StepDone)] == [{}] * 3
    assert [one.loss for one in plain if isinstance(one, StepDone)] == [
        one.loss for one in alone if isinstance(one, StepDone)
    ]


def test_logits_that_do_not_count_are_not_seen() -> None:
    largest = LargestLogit(torch.device("cpu"))
    largest.see(torch.tensor([[1.0, 2.0], [9.0, 9.0]]), torch.tensor([True, False]))
    largest.see(torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), torch.tensor([True]))
    assert float(largest.value) == 2.0
