"""When the acts of a drill are carried out, and on which node."""

from __future__ import annotations

from pathlib import Path

from springtide.app.fault_watch import Reached
from springtide.app.scenarios import storm
from springtide.app.stage import Act, Stage


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


def stage_of(*acts: Act) -> tuple[Stage, Cluster]:
    cluster = Cluster()
    return Stage(cluster, acts, "/none/{node}", lambda text: None), cluster


def test_an_act_at_a_point_waits_for_its_point_and_hits_the_node_that_reached_it() -> None:
    stage, cluster = stage_of(Act(5, "hang"), Act(5, "kill", at="restore-before"), Act(6, "add"))
    stage.pass_point(Reached("restore", "before", 20))  # not yet
    stage.reach(6, 2)
    assert cluster.did == ["hang a"]
    stage.pass_point(Reached("restore", "after", 20))  # another point
    stage.pass_point(Reached("restore", "before", 20))
    assert cluster.did == ["hang a", "kill b"]
    stage.reach(6, 1)
    assert cluster.did == ["hang a", "kill b", "add c"]
    assert [(one.step, one.what, one.at) for one in stage.done] == [
        *((6, "hang", ""), (6, "kill", "restore-before"), (6, "add", "")),
    ]


def test_a_point_of_the_driver_or_of_a_node_that_leaves_hits_another_one(tmp_path: Path) -> None:
    acts = Act(5, "drain"), Act(5, "hang", at="take-before"), Act(5, "kill", at="claim-after")
    cluster = Cluster()
    stage = Stage(cluster, acts, str(tmp_path / "{node}"), lambda text: None)
    stage.reach(5, 2)
    stage.pass_point(Reached("take", "before", 1))
    stage.pass_point(Reached("claim", "after", 10))
    stage.end()
    assert (tmp_path / "a").exists()
    assert cluster.did == ["hang b", "kill b"]


def test_an_act_at_a_point_that_nothing_reaches_is_carried_out_later() -> None:
    stage, cluster = stage_of(Act(5, "kill", at="restore-before"))
    stage.reach(44, 2)
    assert cluster.did == []
    stage.reach(45, 2)
    assert cluster.did == ["kill a"]


def test_faults_of_a_storm_come_while_no_group_trains_and_a_node_is_always_left() -> None:
    for seed in range(1, 13):
        acts, nodes = storm(seed, 20).acts, 3
        for act in acts:
            nodes += {"add": 1, "kill": -1, "drain": -1, "hang": 0}[act.what]
            assert nodes >= 1
            assert not (act.at and act.what == "add")
        faults = [act for act in acts if act.what != "add"]
        assert len(faults) == 20
        assert sum(bool(act.at) for act in faults) >= 3
