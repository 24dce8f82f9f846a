"""Weights, moments and activations on the host: the same training, resized on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loops import train_laid_out
from prepared import prepare

from springtide import config as configs
from springtide.config import Config
from springtide.events import Event, StepDone

pytestmark = pytest.mark.distributed
STEPS = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("offload")
    changes: dict[str, Any] = {"run.root": f"{root}/runs", "shards.root": f"{root}/datasets", "corpus.max_files": 20}
    changes |= {"train.total": STEPS * 12 * 64, "train.eval_tokens": 0, "train.micro_batch": 2}
    changes |= {"optim.warmup": 2 * 12 * 64, "checkpoint.every_steps": 0}
    changes |= {"elastic.min_workers": 2, "elastic.max_workers": 2}
    changes |= {"parallel.recompute": "full", "parallel.reduction": "fp64"}
    return prepare(configs.recipes.tiny().override(changes))


def losses(events: list[Event]) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepDone)]


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
