"""Who trains: single rules, and thousands of random histories tick by tick."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from springtide.elastic.forecast import RestartForecast
from springtide.elastic.policy import (
    Bounds,
    Decision,
    GiveUp,
    Leave,
    Node,
    PolicyState,
    Replace,
    Start,
    Stay,
    WorkerGroup,
    decide,
)

BOUNDS = Bounds(min_workers=2, max_workers=8, settle_s=2.0, reserve_s=5.0)
PAYS = RestartForecast(restart_s=5.0)
THREE = [Node("a", 1), Node("b", 1), Node("c", 1)]
TICK_S = 0.5
READY_S = 4.0
"""Until the processes on a node stand that has joined."""


def after_quiet(
    nodes: list[Node],
    group: WorkerGroup | None,
    prospects: RestartForecast = PAYS,
    bounds: Bounds = BOUNDS,
    after_s: float = 100.0,
) -> Decision:
    """What is decided of nodes that have not changed for long."""
    _, memory = decide(bounds, nodes, group, prospects, PolicyState(held=frozenset("a")), 0.0)
    return decide(bounds, nodes, group, prospects, memory, after_s)[0]


def test_a_run_starts_at_once_with_all_workers() -> None:
    """It starts at once with all it may have and waits a moment for more."""
    eight = [Node(str(number), 2) for number in range(5)]
    first, memory = decide(BOUNDS, eight, None, PAYS, PolicyState(), 0.0)
    assert isinstance(first, Start)
    assert (first.workers, first.nodes) == (8, ("0", "0", "1", "1", "2", "2", "3", "3"))
    fewer, memory = decide(BOUNDS, THREE, None, PAYS, PolicyState(), 0.0)
    assert isinstance(fewer, Stay)
    assert "room for 3 of 8" in fewer.reason
    later, _ = decide(BOUNDS, THREE, None, PAYS, memory, 2.0)
    assert isinstance(later, Start)
    assert later.workers == 3
    again, _ = decide(BOUNDS, THREE, None, PAYS, PolicyState(held=frozenset("a")), 0.0)
    assert isinstance(again, Start)  # after a loss nobody waits


def test_a_paused_run_leaves_and_starts_nothing() -> None:
    """A paused run leaves for the store and starts nothing until it may."""
    group, paused = WorkerGroup(("a", "b", "c")), dataclasses.replace(BOUNDS, paused_by="me@here", wait_s=10.0)
    leaves = after_quiet(THREE, group, bounds=paused)
    assert leaves == Leave("paused by me@here", durable=True)
    assert isinstance(after_quiet(THREE[:2], group, bounds=paused), Replace)  # it cannot leave: it has lost a worker
    rests = after_quiet(THREE, None, bounds=paused)
    assert isinstance(rests, Stay)
    assert rests.save
    assert isinstance(after_quiet([], None, bounds=paused), Stay)  # elastic.wait does not end it
    _, memory = decide(paused, [], None, PAYS, PolicyState(held=frozenset("a")), 0.0)
    waits, _ = decide(dataclasses.replace(paused, paused_by=""), [], None, PAYS, memory, 100.0)
    assert isinstance(waits, Stay)  # the wait begins now
    assert isinstance(after_quiet(THREE, None), Start)


def test_a_group_above_the_limit_leaves() -> None:
    """A group above the limit leaves and the next one keeps to it."""
    group, fewer = WorkerGroup(("a", "b", "c")), dataclasses.replace(BOUNDS, max_workers=2)
    assert after_quiet(THREE, group, bounds=fewer) == Leave("resize from 3 to 2 workers")
    starts = after_quiet(THREE, None, bounds=fewer)
    assert isinstance(starts, Start)
    assert starts.workers == 2
    assert isinstance(after_quiet(THREE, WorkerGroup(("a", "b")), bounds=fewer), Stay)
    too_few = after_quiet(THREE, group, bounds=dataclasses.replace(fewer, min_workers_for_memory=3))
    assert too_few == Stay("2 workers are too few for a step; 3 train")


def test_it_says_what_it_waits_for() -> None:
    nodes = [Node("aaaaaaaaaaaa", 1), Node("b", 1, leaves_at=9.0), Node("c", 1, problem="is slow")]
    waits = after_quiet(nodes, None)
    assert isinstance(waits, Stay)
    assert waits.reason == (
        "waiting for capacity: room for 1 workers, elastic.min_workers is 2; leaving: b; excluded: c is slow"
    )


def test_doomed_nodes_train_until_the_group_must_leave() -> None:
    group = WorkerGroup(("a", "b", "c"))
    told = [Node("a", 1, leaves_at=130.0), *THREE[1:]]
    stays = after_quiet(told, group, after_s=124.0)
    assert stays == Stay("notice: a will be taken away in 6 s; it trains on until it must leave", until_s=125.0)
    assert after_quiet(told, group, after_s=125.0) == Leave("notice: a will be taken away in 5 s", by_s=125.0)


@pytest.mark.parametrize(
    ("prospects", "room", "needs_s"),
    [
        (RestartForecast(step_s=0.0), True, 5.0),  # the reserve
        (RestartForecast(step_s=10.0), True, 29.0),  # asked in one step, agreed on in it or in the next
        (RestartForecast(step_s=10.0, save_s=20.0), True, 59.0),  # no copy is measured: a save has to fit, too
        (RestartForecast(step_s=10.0, save_s=20.0, copy_s=4.0), True, 30.0),
        (RestartForecast(step_s=10.0, copy_s=4.0, leave_steps=4), True, 54.0),  # as measured
        (RestartForecast(step_s=10.0, save_s=20.0, copy_s=4.0), False, 74.0),  # after a save that is under way
        (RestartForecast(step_s=math.inf), True, math.inf),  # no step is measured: at once
    ],
)
def test_a_group_leaves_in_time_for_steps_and_copies(prospects: RestartForecast, room: bool, needs_s: float) -> None:
    """A group leaves in time for its steps and for what it has to copy."""
    group, told = WorkerGroup(("a", "b", "c")), [one._replace(leaves_at=300.0) for one in THREE]
    nodes = [*told, *([Node("d", 3, ready=2)] if room else [])]
    memory = decide(BOUNDS, [*THREE, *nodes[3:]], group, prospects, PolicyState(), 0.0)[1]
    memory = decide(BOUNDS, nodes, group, prospects, memory, 10.0)[1]
    if needs_s < math.inf:
        waits, memory = decide(BOUNDS, nodes, group, prospects, memory, 300.0 - needs_s - 0.5)
        assert isinstance(waits, Stay), waits
        assert waits.save is not room  # early, and again at the end
    leaves, _ = decide(BOUNDS, nodes, group, prospects, memory, max(10.0, 300.0 - needs_s + 0.5))
    assert leaves == Leave(leaves.reason, durable=not room, by_s=leaves.by_s)


@pytest.mark.parametrize(
    ("prospects", "at_s", "by_s"),
    [
        (RestartForecast(step_s=1.0), 12.0, 125.0),  # a save takes the reserve, as far as known
        (RestartForecast(step_s=1.0, save_s=20.0, copy_s=4.0), 12.0, 100.0),  # and a margin
        (RestartForecast(step_s=1.0, save_s=20.0, copy_s=4.0), 94.0, 130.0),  # no time for both: memory is faster
        (RestartForecast(step_s=1.0, save_s=100.0, copy_s=4.0), 12.0, 130.0),
        (RestartForecast(step_s=math.inf, save_s=20.0), 12.0, 130.0),
        (RestartForecast(step_s=1.0, save_s=20.0, copy_s=4.0), 121.0, 130.0),  # late
        (
            RestartForecast(step_s=1.0, save_s=20.0),
            92.0,
            100.0,
        ),  # no copy is measured: it has the reserve, then a save follows
    ],
)
def test_a_group_leaving_into_memory_has_until_the_last_store_save(
    prospects: RestartForecast, at_s: float, by_s: float
) -> None:
    """A group that leaves into memory has until the store is the only way."""
    group, more = WorkerGroup(("a", "b", "c")), [Node("d", 1), Node("e", 1)]  # for more than it has it leaves at once
    told = [Node("a", 1, leaves_at=130.0), *THREE[1:], *more]
    memory = decide(BOUNDS, [*THREE, *more], group, prospects, PolicyState(), 0.0)[1]
    memory = decide(BOUNDS, told, group, prospects, memory, 10.0)[1]
    leaves, _ = decide(BOUNDS, told, group, prospects, memory, at_s)
    assert isinstance(leaves, Leave)
    assert leaves.by_s == by_s


def test_the_state_is_saved_from_memory_while_nobody_can_train() -> None:
    """While nobody can train the state is saved from memory when a node leaves or after a moment."""
    alone = [Node("a", 1)]
    waits, memory = decide(BOUNDS, alone, None, PAYS, PolicyState(held=frozenset("a")), 0.0)
    assert waits == Stay(waits.reason, save=False)
    assert decide(BOUNDS, alone, None, PAYS, memory, 2.0)[0] == Stay(waits.reason, save=True)
    leaving = [Node("a", 1, leaves_at=30.0)]
    told, _ = decide(BOUNDS, leaving, None, PAYS, memory, 1.0)
    assert isinstance(told, Stay)
    assert told.save


def test_losses_within_one_notice_are_one_restart() -> None:
    """All that is lost within a notice is one restart and a short deadline waits for none."""
    nodes, group = [*THREE, Node("d", 1)], WorkerGroup(("a", "b", "c", "d"))
    _, memory = decide(BOUNDS, nodes, group, PAYS, PolicyState(), 0.0)
    nodes[0] = Node("a", 1, leaves_at=130.0)
    _, memory = decide(BOUNDS, nodes, group, PAYS, memory, 10.0)
    nodes[1] = Node("b", 1, leaves_at=210.0)
    other, memory = decide(BOUNDS, nodes, group, PAYS, memory, 90.0)
    assert isinstance(other, Stay)
    leaves, after = decide(BOUNDS, nodes, group, PAYS, memory, 125.0)
    assert leaves == Leave("notice: a, b will be taken away in 5 s", by_s=125.0)
    starts, _ = decide(BOUNDS, nodes, None, PAYS, after, 126.0)
    assert isinstance(starts, Start)
    assert starts.nodes == ("c", "d")
    nodes[2] = Node("c", 1, leaves_at=18.0)
    assert isinstance(decide(dataclasses.replace(BOUNDS, min_workers=1), nodes, group, PAYS, memory, 13.5)[0], Leave)


def test_without_room_a_group_trains_to_the_last_moment() -> None:
    """With nowhere to go it trains until the last moment and saves to the store."""
    told = [node._replace(leaves_at=60.0) for node in THREE]
    group = WorkerGroup(("a", "b", "c"))
    stays, memory = decide(BOUNDS, told, group, PAYS, PolicyState(), 10.0)
    assert isinstance(stays, Stay)
    what = "notice: a, b, c will be taken away in 5 s"
    assert decide(BOUNDS, told, group, PAYS, memory, 55.0)[0] == Leave(what, durable=True, by_s=55.0)


def test_a_group_grows_when_it_pays_and_nodes_have_settled() -> None:
    """It grows when that pays and not before the nodes have settled."""
    nodes, group = [*THREE, Node("d", 1)], WorkerGroup(("a", "b", "c"))
    first, _ = decide(BOUNDS, nodes, group, PAYS, PolicyState(), 0.0)
    assert isinstance(first, Stay)
    assert after_quiet(nodes, group) == Leave("grow from 3 to 4 workers")
    # 3 workers for 20 s do more than 4 for 15
    often, less_often = (dataclasses.replace(BOUNDS, expected_loss_s=seconds) for seconds in (10.0, 11.0))
    assert isinstance(after_quiet(nodes, group, bounds=often, after_s=10.0), Stay)
    assert isinstance(after_quiet(nodes, group, bounds=less_often, after_s=10.0), Leave)
    assert isinstance(after_quiet(nodes, group, RestartForecast(restart_s=5.0, left_s=19.0)), Stay)


def test_each_loss_counts_once_and_raises_the_rate() -> None:
    """What was lost or announced counts once and makes the next more likely."""
    bounds, memory, group = dataclasses.replace(BOUNDS, expected_loss_s=1000.0), PolicyState(), WorkerGroup(("b", "c"))
    leaving = THREE[0]._replace(leaves_at=500.0)
    histories = [
        (0.0, THREE, 1000.0),
        (100.0, THREE[:2], 1100.0 / 2),
        (110.0, THREE[:2], 1110.0 / 2),
        (120.0, THREE, 1120.0 / 2),  # one that joins is no loss
        (130.0, [leaving, *THREE[1:]], 1130.0 / 3),
        (500.0, THREE[1:], 1500.0 / 3),  # it was announced, and counted
    ]
    for now, nodes, expected in histories:
        _, memory = decide(bounds, nodes, group, PAYS, memory, now)
        assert memory.loss_s(bounds, now) == expected


def test_a_group_trains_while_new_processes_start() -> None:
    """A group is never kept waiting for processes and grows once they stand."""
    bounds, here = dataclasses.replace(BOUNDS, min_workers=1), PolicyState(held=frozenset("ab"))
    new = [node._replace(ready=0) for node in (Node("c", 1), Node("d", 1))]
    both = [*THREE[:2], *new]
    lost, _ = decide(bounds, both, None, PAYS, here, 0.0)
    assert isinstance(lost, Start)
    assert lost.nodes == ("a", "b")
    most = [*THREE[:1], *new]
    lost, _ = decide(bounds, most, None, PAYS, here, 0.0)
    assert isinstance(lost, Start)
    assert lost.workers == 3  # one of three is too little to begin with
    never = dataclasses.replace(bounds, grow="never")
    lost, _ = decide(never, both, None, PAYS, here, 0.0)
    assert isinstance(lost, Start)
    assert lost.workers == 4  # for the others could not join it later

    group = WorkerGroup(("a", "b"))
    decision, memory = decide(bounds, both, group, PAYS, here, 10.0)
    decision, memory = decide(bounds, both, group, PAYS, memory, 20.0)
    assert decision == Stay("room for 4 workers instead of 2; their processes are getting ready")
    one_ready = [*THREE[:2], new[0]._replace(ready=1), new[1]]
    decision, memory = decide(bounds, one_ready, group, PAYS, memory, 30.0)
    assert isinstance(decision, Stay)
    assert decision.until_s == 60.0
    assert decide(bounds, one_ready, group, PAYS, memory, 60.0)[0] == Leave("grow from 2 to 3 workers")


def test_a_group_leaves_doomed_nodes_early_only_to_grow() -> None:
    """A group leaves doomed nodes early only for more than it has and when that is ready."""
    group, more = WorkerGroup(("a", "b", "c")), [Node("d", 1, ready=0), Node("e", 1, ready=0)]
    nodes = [THREE[0]._replace(leaves_at=130.0), *THREE[1:], *more]
    _, memory = decide(BOUNDS, nodes, group, PAYS, PolicyState(), 0.0)
    decision, memory = decide(BOUNDS, nodes, group, PAYS, memory, 10.0)
    assert isinstance(decision, Stay)
    assert decision.reason.endswith("getting ready")
    assert isinstance(decide(BOUNDS, nodes, group, PAYS, memory, 125.0)[0], Leave)
    slow = PAYS._replace(step_s=10.0)  # two steps have to end before it
    assert isinstance(decide(BOUNDS, nodes, group, slow, memory, 105.0)[0], Leave)
    one_ready = [*nodes[:3], more[0]._replace(ready=1), more[1]]
    assert isinstance(decide(BOUNDS, one_ready, group, PAYS, memory, 10.0)[0], Stay)  # as many as train
    both_ready = [*nodes[:3], *(node._replace(ready=1) for node in more)]
    assert isinstance(decide(BOUNDS, both_ready, group, PAYS, memory, 10.0)[0], Leave)
    never = dataclasses.replace(BOUNDS, grow="never")
    assert isinstance(decide(never, both_ready, group, PAYS, memory, 10.0)[0], Stay)


@pytest.mark.parametrize(("restart_s", "expected"), [(2.0, Leave), (90.0, Stay)])
def test_with_frequent_losses_a_dear_restart_waits(restart_s: float, expected: type[Decision]) -> None:
    """Where losses come often a dear restart waits for those that may follow."""
    group, more = WorkerGroup(("a", "b", "c")), [Node("d", 1), Node("e", 1)]
    bounds, prospects = dataclasses.replace(BOUNDS, expected_loss_s=60.0), PAYS._replace(restart_s=restart_s)
    memory = decide(bounds, [*THREE, *more], group, prospects, PolicyState(), 0.0)[1]
    nodes = [THREE[0]._replace(leaves_at=130.0), *THREE[1:], *more]
    memory = decide(bounds, nodes, group, prospects, memory, 10.0)[1]
    decision, memory = decide(bounds, nodes, group, prospects, memory, 13.0)
    assert isinstance(decision, expected), decision
    assert isinstance(decide(bounds, nodes, group, prospects, memory, 126.0)[0], Leave)  # in any case


def test_growth_waits_for_more_nodes_up_to_one_restart() -> None:
    """Growth waits for more that may join until that has cost a restart.

    One node in ten minutes, restarts of 120 s: two nodes are worth one, or one that has waited for long enough."""
    group, prospects, memory = WorkerGroup(tuple("abcdefg")), PAYS._replace(restart_s=120.0), PolicyState()
    bounds, nodes = Bounds(1, 99), [Node(name, 1) for name in "abcdefg"]
    for minute in range(0, 60, 10):  # how often nodes join, as seen so far; they do not stay
        passing = [Node(f"passing{minute}", 1)] if minute else []
        for now, here in ((60.0 * minute, [*nodes, *passing]), (60.0 * minute + 1.0, nodes)):
            memory = decide(bounds, here, group, prospects, memory, now)[1]
    bounds, nodes = dataclasses.replace(bounds, expected_loss_s=1e6), [*nodes, Node("h", 1)]
    memory = decide(bounds, nodes, group, prospects, memory, 3600.0)[1]
    waits, memory = decide(bounds, nodes, group, prospects, memory, 3602.0)
    assert isinstance(waits, Stay)
    assert waits.reason.startswith("8 workers instead of 7 ")
    assert 3602.0 < waits.until_s <= 3602.0 + 8 * 120.0  # a worker that is missed for 960 s
    assert isinstance(decide(bounds, nodes, group, prospects, memory, waits.until_s + 0.1)[0], Leave)


@pytest.mark.parametrize(("leaves_at", "expected"), [(5.0, Leave), (10.0, Leave), (365 * 24 * 3600.0, Stay)])
def test_past_notices_count_at_once_and_distant_ones_later(leaves_at: float, expected: type[Decision]) -> None:
    """A notice in the past is followed at once and one a year ahead when it is near."""
    nodes, group = [Node("a", 1, leaves_at=leaves_at), *THREE[1:]], WorkerGroup(("a", "b", "c"))
    _, memory = decide(BOUNDS, THREE, group, PAYS, PolicyState(), 0.0)
    decision, memory = decide(BOUNDS, nodes, group, PAYS, memory, 10.0)
    assert isinstance(decision, expected)
    if expected is Stay:  # until then the node is used like any other
        assert decision.reason == "3 workers train"
        starts, _ = decide(BOUNDS, nodes, None, PAYS, memory, 20.0)
        assert isinstance(starts, Start)
        assert starts.workers == 3
        later, _ = decide(BOUNDS, nodes, group, PAYS, memory, leaves_at - 60.0)
        assert later.reason.startswith("notice: a ")


def test_a_run_waits_for_capacity_for_its_limit_each_time() -> None:
    """It waits for capacity as long as it was told to and anew each time."""
    bounds, memory = dataclasses.replace(BOUNDS, min_workers=3, wait_s=10.0), PolicyState()
    for now, nodes, expected in (
        (0.0, THREE[1:], Stay),
        (9.0, THREE[1:], Stay),
        (9.5, THREE, Stay),  # enough; more may be joining
        (10.0, THREE[1:], Stay),
        (19.0, THREE[2:], Stay),
        (20.0, THREE[2:], GiveUp),
    ):
        decision, memory = decide(bounds, nodes, None, PAYS, memory, now)
        assert isinstance(decision, expected), (now, decision)
    assert "room for 1 workers" in decision.reason


def test_growth_may_be_forbidden_or_ordered() -> None:
    nodes, group = [*THREE, Node("d", 1)], WorkerGroup(("a", "b", "c"))
    for grow, prospects, expected in (
        ("never", PAYS, Stay),
        ("always", RestartForecast(restart_s=5.0, left_s=1.0), Leave),
    ):
        bounds = dataclasses.replace(BOUNDS, grow=grow)
        _, memory = decide(bounds, nodes, group, prospects, PolicyState(), 0.0)
        assert isinstance(decide(bounds, nodes, group, prospects, memory, 60.0)[0], expected)


def test_a_node_that_is_gone_or_bad_is_left() -> None:
    assert after_quiet(THREE[1:], WorkerGroup(("a", "b", "c"))) == Replace("lost nodes: a")
    bad = [Node("a", 1, problem="computes wrongly"), *THREE[1:]]
    assert after_quiet(bad, WorkerGroup(("a", "b", "c"))) == Leave("a computes wrongly")


def test_sizes_are_multiples_of_the_cell() -> None:
    bounds = dataclasses.replace(BOUNDS, worker_multiple=4, min_workers=4)
    assert [bounds.feasible(places) for places in range(14)] == [0] * 4 + [4] * 4 + [8] * 6


events = some.one_of(
    some.tuples(some.just("join"), some.integers(0, 7), some.integers(1, 3)),
    some.tuples(some.just("notice"), some.integers(0, 7), some.floats(0.0, 60.0)),
    some.tuples(some.just("survives"), some.integers(0, 7), some.none()),
    some.tuples(some.just("bad"), some.integers(0, 7), some.none()),
    some.tuples(some.just("dies"), some.integers(0, 7), some.none()),
)
histories = some.lists(some.tuples(some.integers(0, 12), events), max_size=30)


class Cluster:
    """Nodes as a history makes them, and a group that does what it is told within a tick."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.nodes, self.group, self.now = bounds, {}, None, 0.0
        self.memory, self.restarts, self.changes = PolicyState(), 0, 0
        self.ready_s: dict[int, float] = {}
        self.last: Decision = Stay("")

    def happen(self, kind: str, name: int, value: Any) -> None:
        """An event of a history; it is none where it makes no sense."""
        node = self.nodes.get(name)
        if kind == "join" and node is None:
            self.nodes[name] = Node(str(name), value, ready=0)
            self.ready_s[name] = self.now + READY_S
        elif node is None:
            return
        elif kind == "dies":
            del self.nodes[name]
        else:
            changes = {
                "notice": {"leaves_at": self.now + (value or 0.0)},
                "survives": {"leaves_at": None},
                "bad": {"problem": "is bad"},
            }
            self.nodes[name] = node._replace(**changes.get(kind, {}))
        self.changes += 1

    def tick(self) -> None:
        """Half a second: nodes whose time has come go, and what is decided is done."""
        self.now += TICK_S
        for name, node in list(self.nodes.items()):
            if node.leaves_at is not None and node.leaves_at <= self.now:
                del self.nodes[name]
                self.changes += 1
        for name, node in self.nodes.items():
            if self.now >= self.ready_s[name]:
                self.nodes[name] = node._replace(ready=node.places)
        nodes = list(self.nodes.values())
        self.last, self.memory = decide(self.bounds, nodes, self.group, PAYS, self.memory, self.now)
        if isinstance(self.last, Start):
            self.check_start(self.last)
            self.group = WorkerGroup(self.last.nodes)
            self.restarts += 1
        elif isinstance(self.last, Leave | Replace):
            assert self.group is not None
            self.group = None

    def check_start(self, start: Start) -> None:
        """It is feasible, and stands on nodes that are alive, stay and are well."""
        assert self.group is None
        assert self.bounds.min_workers <= start.workers <= self.bounds.max_workers
        assert start.workers % self.bounds.worker_multiple == 0
        chosen = [self.nodes[int(name)] for name in start.nodes]
        assert all(node.leaves_at is None and not node.problem for node in chosen)
        assert start.workers == len(start.nodes)
        assert all(start.nodes.count(node.id) <= node.places for node in chosen)
        usable = [node for node in self.nodes.values() if node.leaves_at is None and not node.problem]
        standing, size = (
            self.bounds.feasible(sum(places)) for places in zip(*((n.standing, n.places) for n in usable), strict=True)
        )
        if self.restarts and 2 * standing >= size:  # then nobody waits
            assert all(node.standing for node in chosen)
            assert start.workers == standing


@pytest.mark.parametrize("worker_multiple", [1, 2])
@given(history=histories, least=some.integers(1, 4), extra=some.integers(0, 8))
def test_any_history_ends_in_the_largest_group_that_fits(
    worker_multiple: int, history: Any, least: int, extra: int
) -> None:
    bounds = Bounds(
        min_workers=least * worker_multiple,
        max_workers=(least + extra) * worker_multiple,
        worker_multiple=worker_multiple,
    )
    cluster = Cluster(bounds)
    for ticks, event in history:
        for _ in range(ticks):
            cluster.tick()
        cluster.happen(*event)
    for _ in range(math.ceil(60.0 / TICK_S) + 20):
        cluster.tick()
    # whatever was announced has happened, and nothing has for ten seconds
    fits = bounds.feasible(sum(node.places for node in cluster.nodes.values() if not node.problem))
    if fits:
        assert cluster.group is not None
        assert len(cluster.group.nodes) == fits
    elif cluster.group is not None:  # there is nowhere else to go, so it goes on where it is
        assert any(cluster.nodes[int(name)].problem for name in cluster.group.nodes)
    assert isinstance(cluster.last, Stay)
    # no flapping: a restart has a cause
    assert cluster.restarts <= 1 + cluster.changes
