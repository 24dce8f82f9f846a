"""Snapshots outlive the processes and the nodes that took them, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from springtide.checkpoint.format import Meta
from springtide.checkpoint.snapshot_parts import Snapshot
from springtide.ray.train import snapshot_lookup

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What ``lost_node.py`` saw on three raylets of its own."""
    script = str(Path(__file__).parents[1] / "programs" / "lost_node.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.full
def test_a_lost_node_costs_no_snapshot_that_all_ranks_had_ended(found: dict[str, Any]) -> None:
    assert found["problems"] == []
    assert found["after_a_lost_node"] == 4


@pytest.mark.full
def test_snapshots_are_never_taken_for_another_runs(found: dict[str, Any]) -> None:
    assert found["another_run"] == 0


@pytest.mark.full
def test_the_next_attempts_snapshots_replace_the_older(found: dict[str, Any]) -> None:
    assert found["of_the_next_attempt"] == 7
    assert found["attempts_held"] == [2]


@pytest.mark.full
def test_a_snapshot_server_that_dies_while_it_is_read_is_read_elsewhere(found: dict[str, Any]) -> None:
    assert found["while_a_server_dies"] == 9


@pytest.mark.full
def test_a_group_on_one_node_has_its_copies_on_another_and_again_when_that_is_lost(found: dict[str, Any]) -> None:
    here_and_there = [False, True]
    assert found["lonely"][0] == found["lonely"][2] == here_and_there
    assert found["lonely"][1] in (here_and_there, [True])  # a third node's server may not be up yet


@pytest.mark.full
def test_a_snapshot_server_takes_no_more_than_its_limit(found: dict[str, Any]) -> None:
    assert "checkpoint.memory_bytes allows 0 MiB" in found["past_the_limit"]


@pytest.mark.full
def test_the_servers_commit_what_they_hold_while_nobody_trains(found: dict[str, Any]) -> None:
    assert found["committed_from_memory"] == ["", "committed", 9, 3]


@pytest.mark.full
def test_another_node_reads_again_what_a_node_found_bad(found: dict[str, Any]) -> None:
    good, damaged, nobody, no_storage = found["read_elsewhere"]
    assert (good, nobody, no_storage) == ("", None, None)
    assert "digest expected" in damaged


@pytest.mark.full
def test_a_notice_of_the_cloud_is_soon_a_drain(found: dict[str, Any]) -> None:
    assert found["heard_s"] < 15.0  # it is asked every half second; half of the shortest notice that a cloud gives
    assert found["told"]


@pytest.mark.full
def test_snapshot_servers_wait_with_a_driver_that_has_no_workers_yet(found: dict[str, Any]) -> None:
    assert found["servers_of_another_driver"]
    assert all(found["servers_of_another_driver"])


@pytest.mark.full
def test_snapshot_servers_end_when_their_driver_is_gone(found: dict[str, Any]) -> None:
    assert found["servers_left"] == 0


def test_a_snapshot_server_that_is_lost_is_waited_for_only_where_the_others_have_no_whole_snapshot(
    ray_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        """A server that holds these snapshots, and says so after a while, or never."""

        def __init__(self, snapshots: list[Snapshot], busy_s: float = 0.0) -> None:
            self._snapshots, self._busy_s = snapshots, busy_s

        def found(self) -> Any:
            time.sleep(self._busy_s)  # what it does meanwhile takes this long
            return ("node", 1), [(one.part, 0) for one in self._snapshots]

    def part(step: int, rank: int) -> Snapshot:
        meta = Meta(step=step, tokens=step, world_size=2, order_identity="o", config_fingerprint="c")
        return Snapshot.of(1, rank, meta, (), 0)

    actor = ray.remote(Held).options(num_cpus=0)
    whole = actor.remote([part(7, 0), part(7, 1)])
    half, lost, busy = actor.remote([part(8, 0)]), actor.remote([], 3600.0), actor.remote([part(8, 1)], 2.0)
    ray.get([whole.found.remote(), half.found.remote(), busy.found.remote()])  # all stand
    begin = time.monotonic()
    monkeypatch.setattr(snapshot_lookup, "ANSWER_S", 90.0)
    [(_, held, _)] = snapshot_lookup.contents_of([whole, lost])
    assert [one.meta.step for one, _ in held] == [7, 7]
    assert time.monotonic() - begin < 60
    # of step 8 one that is up may have the rest: it is waited for longer, and one that is not up is not
    monkeypatch.setattr(snapshot_lookup, "ANSWER_S", 0.5)
    monkeypatch.setattr(snapshot_lookup, "BUSY_S", 90.0)
    assert len(snapshot_lookup.contents_of([whole, half, busy, lost])) == 3
    assert time.monotonic() - begin < 60
    monkeypatch.setattr(snapshot_lookup, "BUSY_S", 1.0)
    begin = time.monotonic()
    assert len(snapshot_lookup.contents_of([whole, half, lost])) == 2
    assert time.monotonic() - begin >= 1.0
    for one in (whole, half, busy):
        ray.kill(one)
    ray.kill(lost)
    monkeypatch.setattr(snapshot_lookup, "BUSY_S", 90.0)
    begin = time.monotonic()
    assert len(snapshot_lookup.contents_of([lost])) == 0
    assert time.monotonic() - begin < 60


def test_servers_of_a_killed_driver_commit_the_newest_snapshot_unless_another_driver_has_claimed() -> None:
    script = str(Path(__file__).parents[1] / "programs" / "orphans.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "left": ["committed 5"],
        "taken": [],
        "servers left": 0,
        "the same bits": True,
        "holder": "another driver",
    }
