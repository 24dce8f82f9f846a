"""The capacity book, over random clusters and claims."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from springtide.elastic.allocation import ResourceRequest, allocate

PLACES = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 4), min_size=1)


@st.composite
def claims(draw: st.DrawFn) -> list[ResourceRequest]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        least = draw(st.integers(1, 3))
        priority = draw(st.one_of(st.just(-math.inf), st.integers(-3, 3).map(float)))
        weight = draw(st.sampled_from([0.5, 1.0, 2.0]))
        found.append(ResourceRequest(f"run-{number}", least, least + draw(st.integers(0, 4)), weight, 1, priority))
    return found


@given(PLACES, claims(), PLACES)
def test_nobody_gets_too_much_or_too_little_and_nothing_is_dealt_twice(
    places: dict[str, int], wanted: list[ResourceRequest], before: dict[str, int]
) -> None:
    held = allocate(before, wanted, {})
    shares = allocate(places, wanted, held)
    for claim in wanted:
        size = sum(shares[claim.client_id].values())
        assert size == 0 or claim.min_workers <= size <= claim.max_workers
    for node, number in places.items():
        assert sum(share.get(node, 0) for share in shares.values()) <= number
    free = sum(places.values()) - sum(sum(share.values()) for share in shares.values())
    for claim in wanted:
        size = sum(shares[claim.client_id].values())
        assert free < claim.min_workers if size == 0 else free == 0 or size == claim.max_workers


@given(PLACES, claims())
def test_who_has_a_share_keeps_it_while_nothing_changes(places: dict[str, int], wanted: list[ResourceRequest]) -> None:
    shares = allocate(places, wanted, {})
    assert allocate(places, wanted, shares) == shares


@given(PLACES, claims(), st.sampled_from("abcdefgh"))
def test_a_lost_node_moves_nobody_who_was_not_on_it_to_another(
    places: dict[str, int], wanted: list[ResourceRequest], lost: str
) -> None:
    before = allocate(places, wanted, {})
    after = allocate({node: number for node, number in places.items() if node != lost}, wanted, before)
    for run, share in after.items():
        if sum(share.values()) == sum(before[run].values()) and lost not in before[run]:
            assert share == before[run]


def test_the_least_promising_give_way_first_and_survivors_grow() -> None:
    good, fair, unknown = (
        ResourceRequest("good", 1, 4, priority=-1.0),
        ResourceRequest("fair", 1, 4, priority=-2.0),
        ResourceRequest("unknown", 1, 4),
    )
    places = dict.fromkeys("abcd", 1)
    everyone = allocate(places, [unknown, fair, good], {})
    assert {run: sum(share.values()) for run, share in everyone.items()} == {"good": 2, "fair": 1, "unknown": 1}
    fewer = allocate({"a": 1, "b": 1}, [unknown, fair, good], everyone)
    assert {run: sum(share.values()) for run, share in fewer.items()} == {"good": 1, "fair": 1, "unknown": 0}
    assert sum(allocate(places, [good], everyone)["good"].values()) == 4


def test_weights_share_out_what_is_left() -> None:
    shares = allocate({"a": 9}, [ResourceRequest("heavy", 1, 9, weight=2.0), ResourceRequest("light", 1, 9)], {})
    assert shares == {"heavy": {"a": 6}, "light": {"a": 3}}


def test_a_worker_does_not_change_hands_because_promises_do() -> None:
    one, other = ResourceRequest("one", 1, 3, priority=1.0), ResourceRequest("other", 1, 3, priority=0.0)
    places = dict.fromkeys("abc", 1)
    shares = allocate(places, [one, other], {})
    assert sum(shares["one"].values()) == 2
    assert allocate(places, [one._replace(priority=-1.0), other], shares) == shares
