"""Copies lie in other failure domains, and each node holds the same number, however nodes are spread over domains."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.elastic.copies import Domain, place, preferred, shared

Domains = dict[str, Domain]


def zoned(**sizes: int) -> Domains:
    """Nodes in zones of these sizes, whose names tell the zone."""
    return {f"{zone}{number}": (zone,) for zone, size in sizes.items() for number in range(size)}


def racked(zones: int, racks: int, size: int) -> Domains:
    """Nodes in ``zones`` zones. Each zone has ``racks`` racks, each rack ``size`` nodes."""
    every = itertools.product(range(zones), range(racks), range(size))
    return {f"{zone}-{rack}-{node}": (f"zone {zone}", f"rack {zone}-{rack}") for zone, rack, node in every}


domains_of_nodes = st.lists(st.tuples(*[st.sampled_from(["", "a", "b", "c"])] * 2), min_size=1, max_size=24).map(
    lambda found: {f"node-{number}": domain for number, domain in enumerate(found)}
)


@given(domains_of_nodes, st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_each_node_holds_equally_many_copies_and_none_of_its_own(domains: Domains, copies: int) -> None:
    found = place(domains, domains, copies)
    wanted = min(copies, len(domains) - 1)
    assert found.keys() == domains.keys()
    assert all(len(set(holders)) == wanted and node not in holders for node, holders in found.items())
    assert set(Counter(itertools.chain(*found.values())).values()) == ({wanted} if wanted else set())


@given(domains_of_nodes, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_domain_of_at_most_half_of_the_nodes_never_holds_all_that_was_in_it(domains: Domains, copies: int) -> None:
    found = place(domains, domains, copies)
    for level in (1, 2):
        sizes = Counter(domain[:level] for domain in domains.values())
        for node, holders in found.items():
            inside = [domains[one][:level] == domains[node][:level] for one in holders]
            size = sizes[domains[node][:level]]
            if 2 * size <= len(domains):
                assert not all(inside) or not inside
        # and of a larger domain as many are copied out of it as there are nodes to copy to
        if copies == 1:
            largest, size = sizes.most_common(1)[0]
            left = sum(
                domains[holder][:level] != largest
                for node, holders in found.items()
                if domains[node][:level] == largest
                for holder in holders
            )
            assert left == min(size, len(domains) - size)


@given(domains_of_nodes, st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_what_leaves_holds_no_copy_and_has_its_own_on_nodes_that_stay(
    domains: Domains, copies: int, data: st.DataObject
) -> None:
    leaving = data.draw(st.sets(st.sampled_from(sorted(domains))))
    found, stay = place(domains, domains, copies, leaving), domains.keys() - leaving
    for node, holders in found.items():
        assert len(set(holders)) == len(holders) == min(copies, len(stay - {node}))
        assert set(holders) <= stay - {node}
    held = Counter(itertools.chain(*found.values()))
    if stay:  # what leaves is spread: nobody holds more than twice a share and one
        assert max(held.values(), default=0) <= copies * (2 + 2 * len(leaving) // len(stay))


@given(domains_of_nodes, st.integers(0, 3), st.randoms())
@settings(max_examples=30, deadline=None)
def test_the_order_in_which_nodes_are_named_does_not_matter(domains: Domains, copies: int, random: object) -> None:
    names = sorted(domains)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert place(names, domains, copies) == place(domains, domains, copies)


@given(domains_of_nodes, st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_the_next_best_holders_follow_those_that_are_placed_and_other_domains_come_first(
    domains: Domains, copies: int
) -> None:
    placed = place(domains, domains, copies)
    for node in domains:
        found = preferred(node, domains, domains, copies)
        number = len(placed[node])
        assert tuple(found[:number]) == placed[node]
        assert sorted(found) == sorted(domains.keys() - {node})
        near = [shared(domains, node, one) for one in found[number:]]
        assert near == sorted(near)


def test_a_zone_that_is_lost_whole_takes_no_node_and_its_copy() -> None:
    for domains in (zoned(a=3, b=3), zoned(a=4, b=2, c=2), zoned(a=5, b=1, c=4)):
        for node, (holder,) in place(domains, domains, 1).items():
            assert domains[node] != domains[holder], domains


def test_a_rack_that_is_lost_whole_takes_no_node_and_its_copy_and_zones_come_before_racks() -> None:
    domains = racked(zones=3, racks=4, size=2)
    for node, (holder,) in place(domains, domains, 1).items():
        assert domains[node][0] != domains[holder][0]
    domains = racked(zones=1, racks=4, size=2)
    for node, (holder,) in place(domains, domains, 1).items():
        assert domains[node][1] != domains[holder][1]


def test_names_that_tell_neighbours_do_not_decide_where_nothing_else_is_known() -> None:
    """With a ring in the order of names nearly every copy is on the next node: of 20 that are lost in a row, 19 lose both."""
    nodes = [f"rack-{number // 20:02d}-{number:03d}" for number in range(200)]
    found = place(nodes, {}, 1)
    both = sum(node[:7] == holder[:7] for node, (holder,) in found.items())
    assert both <= 25  # 10 are expected, 180 by name


def test_while_a_zone_leaves_the_others_hold_its_copies_equally() -> None:
    domains = zoned(a=4, b=4, c=4)
    leaving = {node for node in domains if node.startswith("a")}
    found = place(domains, domains, 1, leaving)
    assert set(Counter(holder for holders in found.values() for holder in holders).values()) == {1, 2}
    assert all(domains[node] != domains[holder] for node, (holder,) in found.items())


@pytest.mark.parametrize("copies", [1, 2])
def test_the_work_is_linear_in_the_nodes_but_for_their_sorting(copies: int) -> None:
    """Counted: how often a domain is looked at, for each node."""

    class Counted(dict[str, Domain]):
        looks = 0

        def get(self, node: str, default: object = None) -> Domain:  # type: ignore[override]
            Counted.looks += 1
            return super().get(node, ())

    looks = {}
    for size in (256, 2048):
        domains = Counted({f"node-{number}": (f"zone-{number % 3}",) for number in range(size)})
        Counted.looks = 0
        place(list(domains), domains, copies, [f"node-{number}" for number in range(0, size, 8)])
        looks[size] = Counted.looks / size
    assert looks[2048] <= looks[256] < 8 * copies
