"""Micro-batches of uneven workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from springtide.elastic import micro_slices, micro_steps
from springtide.stream import Order


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 16), st.data())
def test_every_worker_fits_its_rows_into_the_same_number_of_micro_steps(
    lanes: int, per_lane: int, micro_batch: int, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, lanes))
    order = Order(("d",), ((lanes * per_lane,),), 0, lanes * per_lane, lanes, 4)
    steps = micro_steps(lanes * per_lane, lanes, world_size, micro_batch)
    rows = [len(order.lanes_of(rank, world_size)) * per_lane for rank in range(world_size)]
    for count in rows:
        slices = micro_slices(count, steps)
        assert len(slices) == steps
        assert [row for part in slices for row in range(count)[part]] == list(range(count))
        assert max(part.stop - part.start for part in slices) <= micro_batch
    assert steps == -(-max(rows) // micro_batch)  # no more than the fullest worker needs
