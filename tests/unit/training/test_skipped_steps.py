"""Which steps a rollback for a spike skips: those of this run, and none of the run that it branches off."""

from __future__ import annotations

import pytest

from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.stream import open_data
from springtide.training.group_lease import without_suspects


@pytest.mark.parametrize(("branched_at", "skipped"), [(0, [16, 17, 18, 19, 20, 21]), (18, [18, 19, 20, 21])])
def test_spike_skips_no_step_of_the_trunk(tiny: Config, branched_at: int, skipped: list[int]) -> None:
    """A trunk's checkpoint would be one of another order for every later group: the run could not be resumed."""
    start = f"runs/stem/checkpoints/step-{branched_at:010d}" if branched_at else ""
    config = tiny.override({"optim.rollback_steps": 5, "train.start_from": start, "train.start_with": "state"})
    data, rolled_back = without_suspects(config, open_data(tiny.data), StepsDone(22))
    assert rolled_back.skipped == skipped
    assert list(data.order.skip) == skipped
