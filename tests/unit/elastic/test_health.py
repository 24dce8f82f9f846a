"""Who is fit to train."""

from __future__ import annotations

import pytest

from springtide.elastic.health import Health, slow, unfit

GOOD = Health(100e9, 10e9, network_bytes_per_s=1e9)
OTHERS = {"a": GOOD, "b": Health(110e9, 9e9, "", 1e9), "c": Health(90e9, 11e9, "", 5e9)}


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
