"""Micro-batches of uneven workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from springtide.stream import Order
from springtide.training.losses import micro_batches

SHAPES = {"lanes": st.integers(1, 40), "per_lane": st.integers(1, 5), "micro_batch": st.integers(1, 16)}


@given(**SHAPES, by_lane=st.booleans(), data=st.data())
def test_every_worker_makes_as_many_and_each_row_is_in_one(
    lanes: int, per_lane: int, micro_batch: int, by_lane: bool, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, lanes))
    order = Order(("d",), ((lanes * per_lane,),), 0, lanes * per_lane, lanes, 4)
    most_lanes = -(-lanes // world_size)
    counts = set()
    for rank in range(world_size):
        lane_rows = [data.draw(st.integers(0, per_lane)) for _ in order.lanes_of(rank, world_size)]
        slices = micro_batches(lane_rows, per_lane, most_lanes, micro_batch, by_lane)
        counts.add(len(slices))
        assert [row for part in slices for row in range(100)[part]] == list(range(sum(lane_rows)))
        assert max(part.stop - part.start for part in slices) <= micro_batch
    [steps] = counts
    if not by_lane:
        assert steps == -(-most_lanes * per_lane // micro_batch)  # no more than the fullest worker needs


@given(**SHAPES, data=st.data())
def test_by_lane_the_same_rows_are_computed_together_at_any_world_size(
    lanes: int, per_lane: int, micro_batch: int, data: st.DataObject
) -> None:
    order = Order(("d",), ((lanes * per_lane,),), 0, lanes * per_lane, lanes, 4)
    rows = [data.draw(st.integers(0, per_lane)) for _ in range(lanes)]

    def cells(world_size: int) -> list[tuple[int, int]]:
        found, begin = [], 0
        for rank in range(world_size):
            mine = [rows[lane] for lane in order.lanes_of(rank, world_size)]
            slices = micro_batches(mine, per_lane, -(-lanes // world_size), micro_batch, by_lane=True)
            found += [(begin + part.start, begin + part.stop) for part in slices if part.stop > part.start]
            begin += sum(mine)
        return found

    assert cells(data.draw(st.integers(1, lanes))) == cells(1)
