"""A rank that cannot keep its snapshots tells the others, and rank 0, whom the driver hears, tells the world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from keepers import train_with_a_full_keeper

from springtide.config import Config

pytestmark = pytest.mark.distributed


def test_rank_0_tells_that_another_rank_keeps_no_more_snapshots_and_why(
    tiny: Config, ranks: Callable[..., list[Any]]
) -> None:
    changes = {"run.id": "full", "train.total": 12 * 12 * 64, "optim.warmup": 0, "checkpoint.memory_every": 1}
    config = tiny.override(changes | {"train.eval_tokens": 0, "checkpoint.stage": "/dev/shm"})
    found = ranks(2, train_with_a_full_keeper, config, 1)
    for told, taken in found:
        [off] = [one for one in told if one["kind"] == "snapshots"]
        assert off["every_steps"] == 0
        assert off["reason"].startswith("rank 1: snapshots would take 75 MiB of a node")
        assert taken == 2
        assert [one["step"] for one in told if one["kind"] == "step"] == list(range(1, 13))
