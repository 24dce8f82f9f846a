"""Which survivors have the newest whole state together, against every subset looked at one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from springtide.elastic.copies import LiveShard, covers, newest_holders


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_the_newest_step_of_which_every_shard_survives_is_found_and_all_that_have_it(
    num_shards: int, copies: int, data: st.DataObject
) -> None:
    ranks = sorted(data.draw(st.sets(st.integers(0, num_shards * copies - 1))))
    steps = data.draw(st.lists(st.integers(7, 8), min_size=len(ranks), max_size=len(ranks)))
    offers = [LiveShard(rank, step, rank % num_shards, num_shards) for rank, step in zip(ranks, steps, strict=True)]
    expected: tuple[int, ...] = ()
    for step in (7, 8):
        have = tuple(offer.rank for offer in offers if offer.step == step)
        if {rank % num_shards for rank in have} == set(range(num_shards)):
            expected = have
    assert newest_holders(data.draw(st.permutations(offers))) == expected


def test_one_copy_of_a_sharded_state_does_not_survive_the_loss_of_a_rank() -> None:
    assert newest_holders([LiveShard(rank, 9, rank, 4) for rank in (0, 1, 3)]) == ()
    assert not covers([], 1)
