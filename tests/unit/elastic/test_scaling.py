"""How many workers pay off."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from springtide.elastic.allocation import ResourceRequest
from springtide.elastic.group_sizes import speeds, useful


def test_a_size_at_which_the_last_worker_did_little_is_too_large() -> None:
    assert useful({1: 100.0, 2: 108.0}) == 1
    assert useful({1: 100.0, 2: 190.0, 4: 250.0, 8: 500.0}) == 2
    assert useful({2: 100.0, 3: 126.0}) is None


@given(some.dictionaries(some.integers(1, 64), some.floats(0.51, 1.0), max_size=6))
def test_who_scales_well_enough_is_never_limited(efficiencies: dict[int, float]) -> None:
    known, speed, before = dict[int, float](), 0.0, 0
    for size, efficiency in sorted(efficiencies.items()):
        speed += (size - before) * (efficiency * speed / before if before else 1.0)
        known[size], before = speed, size
    assert useful(known) is None


def test_a_few_steps_tell_nothing_and_one_that_waited_is_no_measure() -> None:
    assert speeds([(1, 100.0)] * 9) == {}
    assert speeds([(1, 100.0)] * 9 + [(1, 1.0)] + [(2, 50.0)] * 3) == {1: 100.0}


def test_a_limit_leaves_what_a_run_needs() -> None:
    assert ResourceRequest("a", 2, 8).limited(4) == ResourceRequest("a", 2, 4)
    assert ResourceRequest("a", 2, 8).limited(1) == ResourceRequest("a", 2, 2)
    assert ResourceRequest("a", 2, 8).limited(None) == ResourceRequest("a", 2, 8)
