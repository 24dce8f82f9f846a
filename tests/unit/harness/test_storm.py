"""When the acts of a drill and of a storm are carried out, and on which node."""

from __future__ import annotations

from pathlib import Path

from fault_points.storm import ActAt, StageAtPoints, storm_of
from fault_points.watch import Reached

from springtide.planning.scenarios import Act, Stage


class Cluster:
    """Nodes that only note what is done to them; process 1 is the driver, 10 and 20 are of nodes a and b."""

    def __init__(self) -> None:
        self.nodes = ["a", "b"]
        self.did = list[str]()

    def node_of(self, pid: int) -> str:
        return {10: "a", 20: "b"}.get(pid, "")

    def kill(self, node: str) -> None:
        self.nodes.remove(node)
        self.did.append(f"kill {node}")

    def halt(self, node: str) -> None:
        self.did.append(f"hang {node}")

    def add(self) -> str:
        self.nodes.append("c")
        self.did.append("add c")
        return "c"


def stage_of(*acts: Act) -> tuple[StageAtPoints, Cluster]:
    cluster = Cluster()
    return StageAtPoints(cluster, acts, "/none/{node}", lambda text: None), cluster


def test_an_act_waits_for_its_step_and_its_workers_and_hits_the_oldest_node(tmp_path: Path) -> None:
    cluster = Cluster()
    acts = Act(5, "hang"), Act(5, "drain", workers=2, notice_s=60.0), Act(6, "add"), Act(7, "kill", nodes=2)
    stage = Stage(cluster, acts, str(tmp_path / "{node}"), lambda text: None)
    stage.reach(4, 2)
    assert cluster.did == []
    stage.reach(5, 1)
    assert cluster.did == ["hang a"]
    stage.reach(6, 2)
    assert (tmp_path / "a").read_text() == "60.0"
    assert cluster.did == ["hang a", "add c"]
    stage.reach(7, 3)
    assert cluster.did == ["hang a", "add c", "kill b", "kill c"], "the node that leaves is not hit again"
    assert (stage.to_come, stage.over_at) == ([], None), "a node is still to leave"
    stage.end()
    stage.reach(8, 1)
    assert stage.over_at == 8


def test_the_last_act_may_wait_for_a_size_and_do_nothing() -> None:
    stage, cluster = stage_of(Act(5, "wait", workers=3))
    stage.reach(6, 2)
    assert stage.over_at is None
    stage.reach(7, 3)
    assert (stage.over_at, stage.done, cluster.did) == (7, [], [])


def test_an_act_at_a_point_waits_for_its_point_and_hits_the_node_that_reached_it() -> None:
    stage, cluster = stage_of(ActAt(5, "hang"), ActAt(5, "kill", at="restore-before"), ActAt(6, "add"))
    stage.pass_point(Reached("restore", "before", 20))  # not yet
    stage.reach(6, 2)
    assert cluster.did == ["hang a"]
    stage.pass_point(Reached("restore", "after", 20))  # another point
    stage.pass_point(Reached("restore", "before", 20))
    assert cluster.did == ["hang a", "kill b"]
    stage.reach(6, 1)
    assert cluster.did == ["hang a", "kill b", "add c"]
    assert [(one.step, one.what) for one in stage.done] == [(6, "hang"), (6, "kill"), (6, "add")]


def test_a_point_of_the_driver_or_of_a_node_that_leaves_hits_another_one(tmp_path: Path) -> None:
    acts = ActAt(5, "drain"), ActAt(5, "hang", at="take-before"), ActAt(5, "kill", at="claim-after")
    cluster = Cluster()
    stage = StageAtPoints(cluster, acts, str(tmp_path / "{node}"), lambda text: None)
    stage.reach(5, 2)
    stage.pass_point(Reached("take", "before", 1))
    stage.pass_point(Reached("claim", "after", 10))
    stage.end()
    assert (tmp_path / "a").exists()
    assert cluster.did == ["hang b", "kill b"]


def test_an_act_at_a_point_that_nothing_reaches_is_carried_out_later() -> None:
    stage, cluster = stage_of(ActAt(5, "kill", at="restore-before"))
    stage.reach(44, 2)
    assert cluster.did == []
    stage.reach(45, 2)
    assert cluster.did == ["kill a"]


def test_faults_of_a_storm_come_while_no_group_trains_and_a_node_is_always_left() -> None:
    for seed in range(1, 13):
        acts, nodes = storm_of(seed, 20).acts, 3
        for act in acts:
            nodes += {"add": 1, "kill": -1, "drain": -1, "hang": 0}[act.what]
            assert nodes >= 1
            assert isinstance(act, ActAt)
            assert not (act.at and act.what == "add")
        faults = [act for act in acts if act.what != "add"]
        assert len(faults) == 20
        assert sum(isinstance(act, ActAt) and bool(act.at) for act in faults) >= 3
