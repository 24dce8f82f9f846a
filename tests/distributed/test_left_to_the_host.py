"""Weights, moments and activations on the host: the same training, resized on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loops import train_laid_out
from prepared import short_run

from springtide.config import Config
from springtide.events import Event, StepDone

pytestmark = pytest.mark.distributed
STEPS = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return short_run(
        tmp_path_factory.mktemp("offload"),
        STEPS,
        optim__warmup=2 * 12 * 64,
        elastic__min_workers=2,
        elastic__max_workers=2,
        parallel__recompute="full",
        parallel__reduction="fp64",
    )


def losses(events: list[Event]) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepDone)]


@pytest.mark.full
def test_a_run_is_moved_to_the_host_and_resized_without_another_bit(
    config: Config, ranks: Callable[..., list[Any]]
) -> None:
    expected = losses(ranks(1, train_laid_out, config.override({"run.id": "on-the-device"}))[0])
    assert len(expected) == STEPS
    found: list[float] = []
    for world_size, offload, stop_at in ((2, "none", 3), (2, "all", 6), (1, "parameters", 0)):
        changed = config.override({"run.id": "moving", "parallel.offload": offload})
        found += losses(ranks(world_size, train_laid_out, changed, stop_at)[0])
    assert found == expected
