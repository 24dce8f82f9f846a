"""The holders of a snapshot and of its copy are lost at once, without notice: a copy of the model that survives has it all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_copies import train_beside_a_twin

from springtide.config import Config
from springtide.events import Started, StepDone

pytestmark = pytest.mark.distributed
STEPS = 8


@pytest.mark.parametrize(
    ("layout", "lost"),
    [
        ({"strategy": "ddp"}, [0, 1]),
        pytest.param({"shard_workers": 2}, [0, 1], marks=pytest.mark.full),  # of each shard one copy is left
    ],
)
def test_a_run_that_loses_both_holders_of_a_snapshot_goes_on_from_a_live_copy_bit_for_bit(
    tiny: Config, ranks: Callable[..., list[Any]], tmp_path: Any, layout: dict[str, Any], lost: list[int]
) -> None:
    changes = {
        "train.total": STEPS * 12 * 64,
        "train.eval_tokens": 0,
        "train.sample_tokens": 0,
        "train.micro_batch": 1,
        "optim.warmup": 0,
        "checkpoint.every_steps": 0,
        "checkpoint.memory_every": 3,
        "checkpoint.stage": "/dev/shm",
        "elastic.min_workers": 2,
        "elastic.max_workers": 4,
        "parallel.reduction": "fp64",
        **{f"parallel.{name}": value for name, value in layout.items()},
    }
    config = tiny.override(changes)
    found = ranks(4, train_beside_a_twin, config, str(tmp_path), lost, 5)
    for rank, ((expected_events, expected), (events, state)) in enumerate(found):
        if rank in lost:
            continue
        started = events[0]
        assert isinstance(started, Started)
        # the newest snapshot is of step 3, and a part of it is on lost nodes only; nothing was ever committed
        assert (started.step, started.world_size, started.resumed_from) == (5, 2, "live copy of step 5")
        losses = [event.loss for event in events if isinstance(event, StepDone)]
        assert losses == [event.loss for event in expected_events if isinstance(event, StepDone)][5:]
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
