"""The rank that all others wait for is named, and none where it may have a good reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.elastic.stalled import Frames, doing, first_look_s, found_by_s, is_deadlock, stalled

WAITS: Frames = ("/lib/torch/distributed/distributed_c10d.py:3157", "/springtide/training/step.py:20")
STANDS: Frames = ("/my_code/model.py:12", "/springtide/training/step.py:80")
LATER: Frames = ("/my_code/model.py:13", "/springtide/training/step.py:80")
COMPUTES: Frames = ("/lib/torch/autograd/graph.py:841", "/springtide/training/step.py:80")
READS: Frames = ("/lib/threading.py:5", "/springtide/stream/load.py:9")
OURS: Frames = ("/lib/threading.py:5", "/springtide/ray/train/worker.py:80", "/springtide/ray/train/worker.py:99")
"""A rank that stands at a line of ours that is no call of Ray's."""
ASKS: Frames = ("/lib/ray/_private/worker.py:990", "/springtide/ray/train/mailbox.py:380")
COMPILES: Frames = ("/lib/subprocess.py:5", "/lib/torch/_inductor/compile_fx.py:9")


@given(st.lists(st.sampled_from([WAITS, STANDS, OURS, COMPUTES, (), READS, ASKS, COMPILES]), min_size=1, max_size=6))
def test_ranks_are_named_only_where_every_other_rank_waits_for_them(now: list[Frames]) -> None:
    plain = WAITS in now and not {READS, ASKS, COMPILES, COMPUTES} & set(now)
    assert stalled(now, now) == ([rank for rank, one in enumerate(now) if one in ((), STANDS, OURS)] if plain else [])


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([WAITS, STANDS], [WAITS, LATER]),  # it is slow
        ([WAITS, COMPUTES], [WAITS, COMPUTES]),  # it may be slow
        ([WAITS, ()], [WAITS, STANDS]),  # it was busy
        ([WAITS, STANDS], [WAITS, WAITS]),  # it has come
        ([WAITS, WAITS], [WAITS, WAITS]),  # all wait: a collective does not end
        ([STANDS, WAITS], [LATER, WAITS]),
        ([WAITS, STANDS], [WAITS]),
    ],
)
def test_what_moves_between_two_looks_is_not_named(before: list[Frames], now: list[Frames]) -> None:
    assert stalled(before, now) == []


def test_a_block_that_is_computed_again_is_no_collective_although_torch_keeps_it_there() -> None:
    wrapper = "/lib/torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py:170"
    assert doing(("/my_code/model.py:12", "/lib/nn/module.py:1", "/lib/nn/module.py:2", wrapper)) == "else"


def test_a_stalled_rank_is_named_within_three_steps_and_ten_seconds() -> None:
    from springtide.elastic.stalled import APART_S
    from springtide.ray.train.hang import LOOK_S

    for step_s in (0.01, 1.0, 60.0):
        assert first_look_s(step_s) + LOOK_S + APART_S + LOOK_S <= found_by_s(step_s) == 3 * step_s + 10.0


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ([WAITS, WAITS], [WAITS, WAITS], True),
        ([WAITS], [WAITS], True),  # of itself, as NCCL does
        ([WAITS, WAITS], [WAITS, READS], False),
        ([WAITS, WAITS], [WAITS, WAITS[:1]], False),  # at another line: it goes on
        ([WAITS, READS], [WAITS, READS], False),  # the store may come back
        ([WAITS, COMPUTES], [WAITS, COMPUTES], False),
        ([(), ()], [(), ()], False),  # the driver is cut off: they may train
        ([], [], False),
    ],
)
def test_a_group_whose_ranks_all_wait_for_each_other_is_found_by_the_steps_it_has_made(
    before: list[Frames], now: list[Frames], found: bool
) -> None:
    assert is_deadlock(before, now, silent_s=40.0, step_s=0.01) == found  # half a minute where steps take milliseconds
    assert is_deadlock(before, now, silent_s=1300.0, step_s=60.0) == found  # minutes only where steps take minutes
    assert not is_deadlock(before, now, silent_s=1100.0, step_s=60.0)
    assert not is_deadlock(before, now, silent_s=20.0, step_s=0.01)
