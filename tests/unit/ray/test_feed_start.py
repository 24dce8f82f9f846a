"""When a rank's pipeline starts: training on the first step does not wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from springtide.config import Config
from springtide.config.data import FeedConfig
from springtide.ray.data import feed as feed_module
from springtide.stream import Batch, RankReader, Read, load, open_data


@pytest.mark.parametrize(("steps_per_read", "at_first"), [(3, False), (1, True)])
def test_a_pipeline_starts_after_the_first_step_unless_the_next_one_needs_it(
    tiny: Config, monkeypatch: pytest.MonkeyPatch, steps_per_read: int, at_first: bool
) -> None:
    started = list[list[Read]]()

    def by_tasks(reader: RankReader, plan: list[Read], config: FeedConfig, name: str) -> Iterator[Batch]:
        started.append(plan)
        return load(reader, plan)

    monkeypatch.setattr(feed_module, "_by_tasks", by_tasks)
    reader = RankReader(open_data(tiny.data), 1, 3)
    row_bytes = 2 * (tiny.shards.sequence_length + 1)
    plan = reader.plan(5, 17, steps_per_read * len(reader.data.order.rank_batch(0, 1, 3)) * row_bytes)
    assert len(plan[0].steps) == steps_per_read
    batches = feed_module.feed(reader, plan, tiny.feed)
    first = next(batches)
    assert bool(started) == at_first
    rest = list(batches)
    assert started == [plan[1:]]
    assert [batch.step for batch in (first, *rest)] == list(range(5, 17))
    for batch in (first, *rest):
        assert (batch.sample_ids == reader.data.order.rank_batch(batch.step, 1, 3)).all()
