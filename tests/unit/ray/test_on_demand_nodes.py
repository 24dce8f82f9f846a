"""How a run with a deadline orders nodes by label and gives them back. Ray and the clock are faked, the decisions are real."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import ScalingConfig

from springtide import config as configs
from springtide.elastic.forecast import RestartForecast
from springtide.elastic.policy import Bounds, Node
from springtide.events import DeadlineChecked, Ordered
from springtide.ray._ray_private import HEAD, MARKET_LABEL
from springtide.ray.train import on_demand
from springtide.ray.train.job import TrainJob
from springtide.ray.train.mailbox import Progress
from springtide.ray.train.on_demand import OnDemandNodes, Provision

BEGUN_S, STEP_S = 1000.0, 10.0
ORDERED, OTHERS = {MARKET_LABEL: "on-demand"}, {MARKET_LABEL: "!on-demand"}


def at_once(name: str, function: Callable[[], Any], daemon: bool) -> Future[Any]:
    """As ``in_thread``."""
    future: Future[Any] = Future()
    future.set_result(function())
    return future


class Cluster:
    """A cluster with one run of 1000 steps of 40 worker-seconds that must be done in 8000 s, so by 5 workers on average."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 8) -> None:
        self.now_s, self.step, self.busy = 0.0, 0, tuple[str, ...]()
        self.markets, self.cpus = {"head": ""}, Counter[str](head=1)
        self.posted, self.drained, self.killed, self.trimmed = (
            list[Any](),
            list[str](),
            list[str](),
            list[dict[str, int]](),
        )
        self.ready, self.provision, self.paused_by = set[str](), Provision.FEASIBLE, ""
        self.is_saved = False
        clock = SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: BEGUN_S + self.now_s)
        monkeypatch.setattr(
            on_demand, "time", SimpleNamespace(**vars(clock), strftime=lambda *_: "then", gmtime=lambda at: at)
        )
        monkeypatch.setattr(on_demand, "provision", lambda gcs: self.provision)
        monkeypatch.setattr(on_demand, "in_thread", at_once)
        monkeypatch.setattr(on_demand, "drain", lambda gcs, node, deadline_ms, why: self.drained.append(node))
        context = SimpleNamespace(gcs_address="gcs")
        ray: Any = SimpleNamespace(
            get_runtime_context=lambda: context, get_actor=lambda name, namespace: name, kill=self.killed.append
        )
        monkeypatch.setattr(on_demand, "ray", ray)
        processes: Any = SimpleNamespace(
            ready=lambda busy: Counter(self.ready), trim=lambda places, busy: self.trimmed.append(places)
        )
        config = configs.recipes.tiny().override(
            {"run.id": "mine", "elastic.deadline": "8000s", "elastic.max_workers": most, "track.price": 3.0}
        )
        assert config.num_steps > 0
        mailbox: Any = SimpleNamespace(post=self.posted.extend)
        scaling = ScalingConfig(num_workers=(1, most), resources_per_worker={"CPU": 1})
        self.bounds = Bounds(1, most)
        self.mine = OnDemandNodes(TrainJob(config, mailbox, begun_s=BEGUN_S), scaling, self.bounds, processes)
        self.mine._plan = self.mine._plan._replace(num_steps=1000)
        self.scaling = self.mine.labelled(scaling)

    def add(self, market: str, *names: str, cpus: int = 1) -> None:
        """Nodes join, and their processes are ready."""
        self.markets |= dict.fromkeys(names, market)
        self.cpus.update(dict.fromkeys(names, cpus))
        self.ready |= set(names)

    def train(self, *nodes: str) -> None:
        """A group of four workers trains on these nodes, and more if there are more."""
        self.busy = nodes

    def look(self, steps: int = 4, seconds: float = 10.0) -> dict[str, Node]:
        """The policy looks after a while."""
        self.now_s += seconds
        self.step += steps if self.busy else 0
        labels = {name: {MARKET_LABEL: market} if market else {} for name, market in self.markets.items()}
        table = [
            {
                "NodeID": name,
                "Labels": labels[name],
                "Resources": {"CPU": 4.0, HEAD: 1.0} if name == "head" else {"CPU": self.cpus[name]},
            }
            for name in self.markets
        ]
        nodes = [Node(name, int(name != "head")) for name in self.markets]
        costs = RestartForecast(restart_s=20.0, step_s=STEP_S * 4 / max(1, len(self.busy)) if self.step else math.inf)
        bounds = self.bounds if not self.paused_by else Bounds(1, 8, paused_by=self.paused_by)
        found = self.mine.look(
            nodes, table, self.busy, bounds, Progress(step=self.step, prospects=costs), self.is_saved
        )
        return {node.id: node for node in found}

    def asks(self, number: int = 8) -> Counter[str]:
        """What the run's request of ``number`` workers says, by market."""
        selectors = self.scaling._label_selector_per_worker(self.mine.requested(number))
        return Counter("" if selectors is None else one[MARKET_LABEL] for one in selectors or [{}])

    def orders(self) -> list[tuple[int, list[str]]]:
        return [(one.workers, one.given_back) for one in self.posted if isinstance(one, Ordered)]


def test_until_a_step_is_measured_only_spot_nodes_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Cluster(monkeypatch)
    assert run.asks() == {"!on-demand": 8}
    run.add("spot", "a", "b")
    run.train("a", "b")
    run.look(steps=1)
    assert run.asks() == {"!on-demand": 8}
    assert not run.mine.has_changed()
    run.markets, run.busy = {}, ()  # and where none comes, the least that there must be is ordered
    run.look(seconds=100.0)
    assert run.asks() == {"!on-demand": 8}
    run.look(seconds=100.0)
    assert run.asks() == {"on-demand": 1, "!on-demand": 7}
    assert run.mine.has_changed()


def test_what_is_behind_is_ordered_and_given_back_ahead_and_ended_there(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Cluster(monkeypatch)
    run.add("spot", "a", "b", "c")
    run.train("a", "b", "c")
    run.look(steps=1)
    for _ in range(8):
        run.look(steps=1, seconds=10.0)
    assert run.orders() == [(3, [])]  # a little more than five workers are needed, and three are there
    assert run.asks() == {"on-demand": 3, "!on-demand": 5}
    run.add("on-demand", "d", "e", "f")
    run.look(steps=0)
    run.train("a", "b", "c", "d", "e", "f")
    for _ in range(4):
        run.look(steps=1)
    while not run.orders()[-1][1]:
        run.look(steps=3)
        assert run.now_s < 4000.0, run.posted
    found = run.look(steps=0, seconds=0.0)
    [*_, (workers, [given])] = run.orders()
    assert workers == 2
    assert run.drained == [given]
    assert found[given].places == 0
    assert found[given].leaves_at is not None
    assert found[given].leaves_at > run.now_s, "the group leaves it between two steps, as at a notice"
    assert not run.killed, "the group is still there"
    run.train(*[node for node in run.busy if node != given])
    run.look(steps=0)
    assert not run.killed, "the next group restores: the only copy may be there"
    run.look(steps=1)
    assert len(run.killed) == 1
    assert run.killed[0].endswith(given)
    assert run.trimmed[-1][given] == 0


def test_a_run_that_gives_all_back_ends_what_it_has_there_when_its_state_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Cluster(monkeypatch)
    run.mine._book.workers = run.mine._book.owed = 1
    run.add("on-demand", "d")
    run.mine._plan = run.mine._plan._replace(num_steps=100)  # one worker has twice the time that it needs
    run.train("d")
    for _ in range(4):
        run.look(steps=10)
    assert run.drained == ["d"]
    run.busy = ()
    run.look()
    assert not run.killed, "the newest state is there only"
    run.is_saved = True
    run.look()
    run.look()
    assert len(run.killed) == 1


def test_a_node_with_workers_of_other_runs_is_left_and_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Cluster(monkeypatch)
    run.mine._book.workers = run.mine._book.owed = 1
    run.add("spot", "a", "b", "c", "d", "f")
    run.add("on-demand", "e", cpus=2)
    run.train("a", "b", "c", "d", "e", "f")
    found = {}
    for _ in range(8):
        found = run.look(steps=30)
    assert run.orders() == [(0, ["e"])]
    assert not run.drained
    assert found["e"].places == 0
    run.train("a", "b", "c", "d", "f")
    run.step = 0  # the run goes back, and orders again: that node is one that it may get
    for _ in range(8):
        found = run.look(steps=1, seconds=300.0)
    assert run.orders()[-1][0] > 0
    assert found["e"].places == 1


def test_a_cluster_that_cannot_order_is_told_once_and_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for provision in (Provision.WITHOUT_LABELS, Provision.MISSING, Provision.INFEASIBLE):
        run = Cluster(monkeypatch)
        run.provision = provision
        run.add("", "a", "b", "c", "d")
        run.train("a", "b", "c", "d")
        for _ in range(30):
            run.look(steps=1)
        told = [one for one in run.posted if isinstance(one, Ordered) and one.problem]
        assert len(told) == 1
        assert provision.value in told[0].describe()
        assert run.mine.requested(8) == 8
        assert run.scaling._label_selector_per_worker(8) is None
        run.provision = Provision.FEASIBLE  # it has one now
        run.look(seconds=600.0)
        run.look(steps=1)
        assert run.orders()[-1][0] > 0
        assert run.asks()["on-demand"] == run.orders()[-1][0]


def test_an_order_is_not_held_up_by_spot_nodes_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Cluster(monkeypatch)
    run.add("spot", "a", "b")
    run.train("a", "b")
    run.provision = Provision.INFEASIBLE
    asked = set()
    for _ in range(4):
        run.look(steps=1)
        asked.add(run.asks()["!on-demand"])
    assert asked == {8, 5, 3}, "those that are there, and half of the others"
    run.provision = Provision.FEASIBLE
    for _ in range(8):
        run.look(steps=1)
    assert run.orders()[-1][0] > 0
    assert run.asks()["on-demand"] == run.orders()[-1][0]


def test_a_deadline_out_of_reach_is_told_once_and_again_when_it_is_in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Cluster(monkeypatch)
    run.add("spot", "a", "b", "c", "d")
    run.train("a", "b", "c", "d")
    run.look(steps=1)
    run.look(steps=4, seconds=4000.0)
    for _ in range(3):
        run.look(steps=1)
    [told] = [one for one in run.posted if isinstance(one, DeadlineChecked)]
    assert not told.can_be_met
    assert "CANNOT BE MET: 8 workers would be done" in told.describe()
    assert "elastic.max_workers = 11" in told.reason
    run.step = 700  # it turns out to be faster
    for _ in range(3):
        run.look(steps=1)
    assert [one.can_be_met for one in run.posted if isinstance(one, DeadlineChecked)] == [False, True]


def test_a_paused_run_orders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Cluster(monkeypatch)
    run.mine._book.workers = run.mine._book.owed = 3
    run.paused_by = "somebody"
    run.look()
    assert run.asks() == {"!on-demand": 8}
    assert run.posted == []


def test_the_time_of_an_order_is_measured_until_a_worker_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Cluster(monkeypatch)
    run.add("spot", "a")
    run.train("a")
    while not run.orders():
        run.look(steps=1)
    ordered_s = run.now_s
    run.add("on-demand", "d")
    run.ready.discard("d")
    run.look(seconds=30.0)
    assert not run.mine._orders_s
    run.ready.add("d")
    run.look(seconds=5.0)
    assert list(run.mine._orders_s) == [run.now_s - ordered_s] == [35.0]
