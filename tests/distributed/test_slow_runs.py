"""A run that is slow for a known cause is told that cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loops import train_with_a_slow_feed

from springtide.config import Config
from springtide.run.folder import Run, open_run
from springtide.storage import Folder
from springtide.tracking.journal import Journal

pytestmark = [pytest.mark.distributed, pytest.mark.processes]


@pytest.mark.full
def test_a_run_with_a_slow_feed_is_told_that_data_limits_it(tiny: Config, ranks: Callable[..., list[Any]]) -> None:
    changes = {
        "run.id": "slow",
        "train.total": tiny.tokens_per_step * 10,
        "optim.warmup": 0,
        "checkpoint.every_steps": 5,
    }
    config = tiny.override(changes)
    events, _ = ranks(2, train_with_a_slow_feed, config, 1, 0.3)
    run = Run(Folder(config.run.root) / "slow")
    run.write_config(config)
    with Journal(run.folder) as journal:
        for event in events:
            journal(event)
    [data] = [one for one in open_run(run.folder.url).why().findings if one.name == "data"]
    assert data.share > 0.3
    assert float(data.evidence["data_wait_s"]) >= 0.3 > 0.5 * float(data.evidence["step_time_s"])
    assert data.evidence["rank"] == 1
    assert "feed.reads_in_flight" in data.remedy
