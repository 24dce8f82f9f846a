"""Which device is named when ranks compute different results for the same micro-batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.training.recheck import MicroBatchResult, Verdict, agree, judge, shifts

RIGHT = MicroBatchResult(700.0, 2.0, (0.5, -1.0), digest=1)
WRONG = MicroBatchResult(650.0, 9.0, (4.0, 4.0), digest=2)
Results = dict[int, list[tuple[int, MicroBatchResult]]]


def of_rank(rank: int) -> MicroBatchResult:
    """The right result of a rank's micro-batch."""
    return RIGHT._replace(nats=700.0 + rank, digest=100 + rank)


class Device:
    """A rank's device, which is wrong at some of its computations, in the same way or differently each time."""

    def __init__(self, rank: int, wrong_at: set[int], differently: bool) -> None:
        self.rank, self.wrong_at, self.differently, self.computed = rank, wrong_at, differently, 0

    def compute(self, owner: int) -> tuple[int, MicroBatchResult]:
        right, self.computed = of_rank(owner), self.computed + 1
        if self.computed not in self.wrong_at:
            return self.rank, right
        digest = 1000 + owner + (self.computed * 10_000 if self.differently else 0)
        return self.rank, right._replace(norm=7.0, digest=digest)


def check(devices: list[Device], exact: bool = True) -> Verdict:
    """Both rounds of a check."""
    size = len(devices)
    results: Results = {owner: [] for owner in range(size)}
    for shift in (0, 1):
        for device in devices:
            owner = (device.rank + shift) % size
            results[owner].append(device.compute(owner))
    verdict = judge(results, size, exact, 1e-3)
    if not verdict.disputed:
        return verdict
    for shift in shifts(size):
        for device in devices:
            owner = (device.rank + shift) % size
            results[owner].append(device.compute(owner))
    return judge(results, size, exact, 1e-3)


ALWAYS = set(range(1, 10))


@given(
    size=st.integers(2, 9),
    liar=st.integers(0, 8),
    wrong_at=st.sampled_from([ALWAYS, {1}, {2}, {1, 2}, {1, 3}, {2, 4}, {1, 2, 3}]),
    differently=st.booleans(),
)
def test_the_one_that_lies_is_named_whenever_and_however_it_does(
    size: int, liar: int, wrong_at: set[int], differently: bool
) -> None:
    honest = [Device(rank, set(), False) for rank in range(size)]
    assert check(honest) == Verdict()
    liar %= size
    honest[liar] = Device(liar, wrong_at, differently)
    verdict = check(honest)
    assert verdict.disputed
    assert not verdict.is_random
    assert set(verdict.wrong) <= {liar}  # never another
    repeats_itself = not differently and wrong_at in (ALWAYS, {1, 3}, {2, 4})
    # of two that each say the same again, it is one's word against the other's
    assert set(verdict.wrong) == (set() if size == 2 and repeats_itself else {liar})


def test_two_that_lie_are_named_among_four_and_nobody_among_three() -> None:
    devices = [Device(0, ALWAYS, True), Device(1, set(), False), Device(2, ALWAYS, True), Device(3, set(), False)]
    assert set(check(devices).wrong) == {0, 2}
    verdict = check(devices[:3])
    assert verdict.disputed
    assert not verdict.wrong
    assert not verdict.is_random


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_model_that_draws_its_own_numbers_accuses_nobody(size: int) -> None:
    verdict = check([Device(rank, ALWAYS, True) for rank in range(size)])
    assert verdict.is_random
    assert not verdict.wrong


def test_rounding_is_no_lie_and_a_lie_is_no_rounding() -> None:
    rounded = RIGHT._replace(nats=700.3, norm=2.001, projections=(0.5015, -1.0), digest=5)
    assert agree(RIGHT, rounded, exact=False, tolerance=1e-3)
    assert not agree(RIGHT, rounded, exact=True, tolerance=1e-3)
    assert agree(RIGHT, rounded._replace(device=1), exact=True, tolerance=1e-3)  # of another kind: it rounds otherwise
    for field, value in {"nats": 701.0, "norm": 2.1, "projections": (0.5, 1.0)}.items():
        assert not agree(RIGHT, RIGHT._replace(**{field: value}, digest=5), exact=False, tolerance=1e-3), field


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_overflow_agrees_with_an_overflow_only(value: float) -> None:
    overflow = RIGHT._replace(norm=value, projections=(value, value), digest=5)
    assert agree(overflow, overflow._replace(digest=6), exact=False, tolerance=1e-3)
    for one, other in ((overflow, RIGHT), (RIGHT, overflow)):
        assert not agree(one, other, exact=False, tolerance=1e-3)
    assert not agree(RIGHT._replace(nats=value, digest=5), RIGHT, exact=False, tolerance=1e-3)
    assert agree(WRONG, WRONG, exact=False, tolerance=0.0)
