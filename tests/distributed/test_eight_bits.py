"""Training with products in fp8: what a resize changes, and what a checkpoint holds of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from eight_bits import train_in_fp8
from loops import train_laid_out
from prepared import short_run

from springtide.config import Config
from springtide.events import Event, Started, StepDone

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs springtide[fp8]"),
]
Ranks = Callable[..., list[Any]]
STEPS = 12


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return short_run(
        tmp_path_factory.mktemp("eight-bits"),
        STEPS,
        optim__warmup=2 * 12 * 64,
        elastic__min_workers=4,
        elastic__max_workers=4,
    )


def losses(events: list[Event]) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepDone)]


@pytest.mark.parametrize("precision", ["fp8", "fp8_rowwise"])
def test_with_exact_sums_a_resize_changes_no_bit(config: Config, ranks: Ranks, precision: str) -> None:
    exact = config.override({"parallel.precision": precision, "parallel.reduction": "fp64", "run.id": f"{precision}-1"})
    expected = losses(ranks(1, train_in_fp8, exact)[0])
    assert len(expected) == STEPS
    found: list[float] = []
    for world_size, shard_workers, stop_at in ((3, 0, 5), (4, 2, 9), (2, 0, 0)):
        changes = {"run.id": f"{precision}-resized", "parallel.shard_workers": shard_workers}
        found += losses(ranks(world_size, train_in_fp8, exact.override(changes), stop_at)[0])
    assert found == expected


def test_a_checkpoint_goes_on_in_another_precision(config: Config, ranks: Ranks) -> None:
    half = config.override({"run.id": "half", "parallel.precision": "bf16"})
    expected = losses(ranks(2, train_laid_out, half)[0])
    found: list[float] = []
    for precision, function, stop_at in (
        ("fp8", train_in_fp8, 4),
        ("bf16", train_laid_out, 8),
        ("fp8_rowwise", train_in_fp8, 0),
    ):
        changed = config.override({"run.id": "crossing", "parallel.precision": precision})
        events = ranks(2, function, changed, stop_at)[0]
        assert isinstance(events[0], Started)
        assert events[0].step == len(found)
        found += losses(events)
    assert found != expected
    assert found == pytest.approx(expected, abs=0.02)
