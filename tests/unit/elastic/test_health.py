"""Who is fit to train."""

from __future__ import annotations

import random
import statistics

import pytest

from springtide.elastic import health
from springtide.elastic.health import SLOW_SHARE, Health, HealthTable, slow

GOOD = Health(100e9, 10e9, network_bytes_per_s=1e9)
OTHERS = {"a": GOOD, "b": Health(110e9, 9e9, "", 1e9), "c": Health(90e9, 11e9, "", 5e9)}


def unfit(node: str, known: dict[str, Health]) -> str:
    """Why a node is unfit beside the others."""
    return HealthTable(known).unfit(node, known[node])


@pytest.mark.parametrize(
    ("mine", "reason"),
    [
        (GOOD, ""),
        (Health(45e9, 4.5e9, "", 1.1e8), ""),
        (Health(100e9, 10e9, "", 0.9e8), "the network reaches it at 9% of the others' speed"),
        (Health(39e9, 10e9), "its device multiplies at 39% of the others' speed"),
        (Health(100e9, 3e9), "its device copies at 30% of the others' speed"),
        (Health(100e9, 10e9, "multiplies wrong"), "its device multiplies wrong"),
    ],
)
def test_slow_and_broken_nodes_are_named(mine: Health, reason: str) -> None:
    assert unfit("d", {**OTHERS, "d": mine}) == reason


def test_a_node_alone_is_compared_with_nobody_and_never_with_one_that_is_broken() -> None:
    slow = Health(1e9, 1e9)
    assert unfit("d", {"d": slow}) == ""
    assert unfit("d", {"d": slow, "a": Health(100e9, 10e9, "copies wrong")}) == ""
    assert unfit("d", {"d": slow._replace(wrong="copies wrong")}) == "its device copies wrong"


def test_who_holds_up_the_others_is_compared_with_the_others() -> None:
    assert slow([100.0, 90.0, 50.0]) == {2: 50 / 95}
    assert slow([100.0, 61.0]) == {}
    assert slow([100.0, 59.0]) == {1: 0.59}
    assert slow([1.0, 1.0, 100.0, 100.0, 100.0]) == {0: 0.01, 1: 0.01}


@pytest.mark.parametrize("ranks", [2, 3, 8, 9])
def test_the_median_of_the_others_is_that_of_a_list_without_oneself(ranks: int) -> None:
    draw = random.Random(ranks)
    for _ in range(20):
        speeds = [draw.choice([1.0, 2.0, 3.0, 5.0, 10.0]) for _ in range(ranks)]
        shares = {rank: one / statistics.median(speeds[:rank] + speeds[rank + 1 :]) for rank, one in enumerate(speeds)}
        assert slow(speeds) == {rank: share for rank, share in shares.items() if share < SLOW_SHARE}


def test_a_thousand_ranks_are_compared_with_one_look_at_the_order_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a large group that measures devices had a median of all for each rank."""
    sorts = list[int]()
    monkeypatch.setattr(health, "sorted", lambda some, **how: sorts.append(1) or sorted(some, **how), raising=False)
    assert slow([100.0] * 999 + [10.0]) == {999: 0.1}
    assert len(sorts) <= 2


def test_nodes_that_come_up_one_after_the_other_are_each_compared_with_those_before() -> None:
    known = HealthTable({"a": GOOD, "broken": Health(1e9, 1e9, "copies wrong")})
    slower = Health(30e9, 10e9)
    assert known.unfit("b", slower) == unfit("b", {"a": GOOD, "b": slower}) != ""
    for node in ("c", "d", "e"):
        known.add(node, slower)
    assert known.unfit("b", slower) == ""
    assert known.unfit("a", slower) == ""  # not compared with what it was itself
    known.add("a", slower)
    assert known.unfit("f", Health(12e9, 10e9)) == ""  # the fast one is forgotten
