"""Which steps a rollback for a spike skips: those of this run, and none of the run that it branches off."""

from __future__ import annotations

import types
from typing import Any

import pytest

from springtide.config import Config
from springtide.stream import open_data
from springtide.training.loop import TrainLoop


@pytest.mark.parametrize(("branched_at", "skipped"), [(0, [16, 17, 18, 19, 20, 21]), (18, [18, 19, 20, 21])])
def test_spike_skips_no_step_of_the_trunk(tiny: Config, branched_at: int, skipped: list[int]) -> None:
    """A trunk's checkpoint would be one of another order for every later group: the run could not be resumed."""
    start = f"runs/stem/checkpoints/step-{branched_at:010d}" if branched_at else ""
    config = tiny.override({"optim.rollback_steps": 5, "train.start_from": start, "train.start_with": "state"})
    loop: Any = types.SimpleNamespace(config=config, data=open_data(tiny.data), state=types.SimpleNamespace(step=22))
    rolled_back = next(TrainLoop._go_back(loop))
    assert rolled_back.skipped == skipped
    assert list(loop.data.order.skip) == skipped
