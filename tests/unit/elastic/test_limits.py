"""What is learnt of the memory of a group's devices, from queued failures."""

from __future__ import annotations

import pytest

from springtide.elastic.group_sizes import MemoryLimits


def test_what_is_too_much_for_a_group_is_too_much_for_smaller_ones_and_for_no_larger_one() -> None:
    limits = MemoryLimits(8)
    assert limits.halve(4, 8) == 4
    assert [limits.rows_at_once(workers) for workers in (1, 3, 4, 5, 64)] == [4, 4, 4, 8, 8]
    assert limits.halve(2, 4) == 2
    assert [limits.rows_at_once(workers) for workers in (1, 2, 3, 4, 5)] == [2, 2, 4, 4, 8]
    assert limits.halve(4, 4) == 2
    assert [limits.rows_at_once(workers) for workers in (2, 4, 5)] == [2, 2, 8]


def test_a_size_that_never_fitted_is_waited_beyond_when_a_larger_one_has_trained() -> None:
    limits = MemoryLimits(1)
    assert not limits.wait_for_more(3, is_over=False)  # nobody has trained: more workers may not help
    limits.trained(5)
    assert not limits.wait_for_more(5, is_over=True)
    assert limits.least_workers == 1
    assert limits.wait_for_more(3, is_over=False)
    assert limits.least_workers == 4
    assert limits.wait_for_more(4, is_over=False)
    assert limits.wait_for_more(2, is_over=False)
    assert limits.least_workers == 5  # it never falls


def test_a_size_that_has_trained_is_tried_again_until_it_is_given_up() -> None:
    limits = MemoryLimits(1)
    limits.trained(3)
    limits.trained(8)
    assert not limits.wait_for_more(3, is_over=False)
    assert limits.wait_for_more(3, is_over=True)
    assert limits.least_workers == 4


@pytest.mark.parametrize(("workers", "least"), [(4, 8), (8, 12), (5, 8)])
def test_workers_come_in_cells(workers: int, least: int) -> None:
    limits = MemoryLimits(1, worker_multiple=4)
    limits.trained(16)
    assert limits.wait_for_more(workers, is_over=False)
    assert limits.least_workers == least
