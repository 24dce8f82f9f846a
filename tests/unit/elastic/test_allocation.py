"""How runs share a cluster's workers, over random clusters and requests."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.elastic import allocation
from springtide.elastic.allocation import Allocation, ResourceRequest, allocate, free_of, in_words, share_cluster

PLACES = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 4), min_size=1)


@st.composite
def claims(draw: st.DrawFn) -> list[ResourceRequest]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        least = draw(st.integers(1, 3))
        score = draw(st.one_of(st.just(-math.inf), st.integers(-3, 3).map(float)))
        weight = draw(st.sampled_from([0.5, 1.0, 2.0]))
        found.append(ResourceRequest(f"run-{number}", least, least + draw(st.integers(0, 4)), weight, 1, score))
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
        ResourceRequest("good", 1, 4, score=-1.0),
        ResourceRequest("fair", 1, 4, score=-2.0),
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
    one, other = ResourceRequest("one", 1, 3, score=1.0), ResourceRequest("other", 1, 3, score=0.0)
    places = dict.fromkeys("abc", 1)
    shares = allocate(places, [one, other], {})
    assert sum(shares["one"].values()) == 2
    assert allocate(places, [one._replace(score=-1.0), other], shares) == shares


KINDS = [(("CPU", 1.0),), (("CPU", 2.0), ("GPU", 1.0))]
NODES = st.dictionaries(
    st.sampled_from("abcde"),
    st.fixed_dictionaries({"CPU": st.integers(0, 6).map(float), "GPU": st.integers(0, 3).map(float)}),
    min_size=1,
)
QUOTAS = st.dictionaries(st.sampled_from(["x", "y"]), st.integers(0, 6))


@st.composite
def queued(draw: st.DrawFn) -> list[ResourceRequest]:
    found = []
    for number in range(draw(st.integers(1, 5))):
        least = draw(st.integers(1, 3))
        most = draw(st.one_of(st.just(0), st.integers(least, 6)))  # 0: it is paused
        priority, queue = draw(st.integers(-1, 1)), draw(st.sampled_from(["x", "y", "z"]))
        found.append(
            ResourceRequest(
                f"run-{number}", least, most, priority=priority, queue=queue, resources=draw(st.sampled_from(KINDS))
            )
        )
    return found


def number_of(shares: Allocation, run: str) -> int:
    return sum(shares.get(run, {}).values())


def used(shares: Allocation, requests: list[ResourceRequest], node: str, kind: str) -> float:
    return sum(dict(one.resources).get(kind, 0.0) * shares.get(one.client_id, {}).get(node, 0) for one in requests)


@given(NODES, queued(), QUOTAS, NODES)
def test_no_node_and_no_quota_is_given_twice_and_a_higher_priority_does_not_feel_a_lower(
    nodes: dict[str, dict[str, float]],
    requests: list[ResourceRequest],
    quotas: dict[str, int],
    before: dict[str, dict[str, float]],
) -> None:
    shares = share_cluster(nodes, requests, share_cluster(before, requests, {}, quotas), quotas)
    for node, resources in nodes.items():
        assert all(used(shares, requests, node, kind) <= amount for kind, amount in resources.items())
    for one in requests:
        assert number_of(shares, one.client_id) in {0, *range(one.min_workers, one.max_workers + 1)}
    for queue, most in quotas.items():
        assert sum(number_of(shares, one.client_id) for one in requests if one.queue == queue) <= most
    for level in {one.priority for one in requests}:
        high = [one for one in requests if one.priority >= level]
        alone, along = (share_cluster(nodes, some, {}, quotas) for some in (high, requests))
        assert all(alone[one.client_id] == along[one.client_id] for one in high)


@given(NODES, st.lists(queued(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_what_another_run_still_holds_is_not_used_before_it_is_given_up(
    nodes: dict[str, dict[str, float]], changes: list[list[ResourceRequest]], chance: random.Random
) -> None:
    """Runs come, change and look while others still give up what an earlier change took from them. In the end each has its
    share, and no node ever had too much."""
    known: dict[str, ResourceRequest] = {}
    shares: Allocation = {}
    holds: Allocation = {}
    for requests in [*changes, [], [], []]:
        for one in requests:
            known[one.client_id] = one._replace(resources=KINDS[int(one.client_id[-1]) % 2])
        all_runs = list(known.values())
        shares = share_cluster(nodes, all_runs, shares)
        for one in chance.sample(all_runs, len(all_runs) if not requests else chance.randint(0, len(all_runs))):
            # it gives up what it may not keep, and starts what it may use
            holds[one.client_id] = free_of(nodes, all_runs, shares, holds)[one.client_id]
            for node, resources in nodes.items():
                assert all(used(holds, all_runs, node, kind) <= amount for kind, amount in resources.items())
    assert {run: held for run, held in holds.items() if held} == {run: held for run, held in shares.items() if held}


def test_a_run_is_told_for_whom_it_leaves_and_what_it_waits_for() -> None:
    cpu = (("CPU", 1.0),)
    low = ResourceRequest("low", 1, 3, queue="x", resources=cpu)
    high = ResourceRequest("high", 2, 2, priority=10, queue="y", resources=cpu)
    third = ResourceRequest("third", 2, 3, priority=-1, queue="x", resources=cpu)
    nodes, requests, holds = (
        {node: {"CPU": 1.0} for node in "abc"},
        [low, high, third],
        {"low": dict.fromkeys("abc", 1)},
    )
    shares = share_cluster(nodes, requests, holds)
    assert {run: number_of(shares, run) for run in shares} == {"high": 2, "low": 1, "third": 0}
    said = {one.client_id: in_words(one.client_id, requests, shares, holds, {}) for one in requests}
    assert said == {
        "low": "'high' (priority 10) gets 2 workers",
        "high": "'low' gives up 2 workers after its step",
        "third": "'high' (priority 10) has 2 workers, 'low' (priority 0) has 1 worker",
    }
    assert in_words("third", requests, {}, {}, {"x": 1}) == "queue 'x' may have 1 worker"
    assert in_words("low", requests, shares, shares, {"x": 9}) == ""


def test_workers_are_dealt_to_many_runs_without_a_look_at_all_runs_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred trials took the queue seconds for each worker that one of them gave back."""
    runs, operations = 200, list[str]()
    for name in ("heappop", "heappush", "heapreplace"):
        real = getattr(allocation.heapq, name)
        monkeypatch.setattr(
            allocation.heapq, name, lambda *rest, real=real, name=name: operations.append(name) or real(*rest)
        )
    nodes = {f"n{number}": 8 for number in range(runs)}
    claims = [ResourceRequest(f"t{number}", 1, 16) for number in range(runs)]
    dealt = allocation.allocate(nodes, claims, {})
    assert {sum(share.values()) for share in dealt.values()} == {8}
    assert len(operations) < 4 * 8 * runs
    again = allocation.allocate(nodes, claims[1:], dealt)
    assert sum(sum(share.values()) for share in again.values()) == 8 * runs
