"""The table of live nodes: after any changes it says what a new table of the same nodes says."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as some

from springtide.elastic.node_table import Node, NodeTable

nodes = some.builds(
    Node,
    id=some.sampled_from("abcdef"),
    places=some.integers(0, 3),
    leaves_at=some.sampled_from([None, None, 9.0]),
    problem=some.sampled_from(["", "", "is slow"]),
    ready=some.sampled_from([None, 0, 1, 9]),
)


@settings(max_examples=60, deadline=None)
@given(some.lists(some.one_of(nodes, some.sampled_from("abcdef")), max_size=20))
def test_changes_one_by_one_are_as_a_new_table(changes: list[Node | str]) -> None:
    table, here = NodeTable(), dict[str, Node]()
    for change in changes:
        if isinstance(change, Node):
            table.set(change)
            here[change.id] = change
        else:
            table.remove(change)
            here.pop(change, None)
        new = NodeTable(here.values())
        assert (table.places, table.standing, table.key) == (new.places, new.standing, new.key)
        assert (table.by_id, table.leaving, table.unfit) == (new.by_id, new.leaving, new.unfit)
        assert table.usable_places == new.usable_places
        usable = {node.id: node for node in here.values() if node.is_usable}
        assert {node.id: node for node in table.usable} == {node.id: node for node in new.usable} == usable
        assert table.standing == sum(node.standing for node in usable.values())
