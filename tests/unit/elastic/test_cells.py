"""Workers that share a copy of the model stay on one node, where that is possible."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

from springtide.elastic.node_table import within_nodes
from springtide.elastic.policy import Bounds, Node, PolicyState, RestartForecast, Start, decide


def started(places: dict[str, int], cell: int, most: int = 64, least: int = 1) -> tuple[str, ...]:
    """The node of each worker of the group that the policy starts."""
    nodes = within_nodes([Node(name, number) for name, number in places.items()], cell, least)
    bounds = Bounds(least, most, worker_multiple=cell, settle_s=0.0)
    decision, _ = decide(bounds, nodes, None, RestartForecast(), PolicyState(), 1e4)
    assert isinstance(decision, Start)
    return decision.nodes


def ranks(plan: tuple[str, ...]) -> list[str]:
    """The node of each rank, as Ray sorts the workers of ``plan``, which come up in any order and with any GPU."""
    places = {name: itertools.count() for name in plan}
    workers = [
        SimpleNamespace(metadata=SimpleNamespace(node_id=name, accelerator_ids={"GPU": [str(next(places[name]))]}))
        for name in sorted(plan, key=lambda name: hash(name) % 7)
    ]
    ordered = WorkerGroup._sort_workers_by_gpu_id_grouped_by_node(workers)
    for _, together in itertools.groupby(ordered, key=lambda worker: worker.metadata.node_id):
        ids = [int(worker.metadata.accelerator_ids["GPU"][0]) for worker in together]
        assert ids == sorted(ids)
    return [worker.metadata.node_id for worker in ordered]


@pytest.mark.parametrize("cell", [2, 4, 8])
def test_no_cell_spans_two_nodes_of_eight_gpus_of_which_some_are_bad(cell: int) -> None:
    places = {f"node-{number}": 8 for number in range(6)} | {"one-bad": 7, "three-bad": 5}
    found = ranks(started(places, cell))
    assert len(found) == 48 + 7 // cell * cell + 5 // cell * cell
    for first in range(0, len(found), cell):
        assert len(set(found[first : first + cell])) == 1, "a cell on one node"


def test_cells_span_nodes_where_none_holds_one_or_too_few_would_train() -> None:
    assert len(started({"a": 4, "b": 4}, 8)) == 8
    assert len(started({"a": 8, "b": 7, "c": 7}, 8, least=16)) == 16
    assert len(started({"a": 8, **{f"small-{number}": 4 for number in range(16)}}, 8)) == 64


def test_processes_that_are_ready_count_by_whole_cells_too() -> None:
    [one, other] = within_nodes([Node("a", 8, ready=5), Node("b", 8)], 4)
    assert (one.ready, other.ready) == (4, None)
    assert within_nodes([Node("a", 4, ready=3)], 8) == [Node("a", 4, ready=3)]
