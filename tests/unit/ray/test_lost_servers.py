"""Snapshot servers of a lost node are not waited for. The servers are in this process; Ray is not there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ray.exceptions import GetTimeoutError
from snapshot_pools import Nodes, taken

from springtide.ray.train import snapshot_lookup
from springtide.storage import Folder

DATA = bytes(range(64))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Nodes:
    """A node with a whole snapshot, and one whose server never answers."""
    found = Nodes(monkeypatch, "ab", Folder(tmp_path), group="a")
    found.ray.handles["b"].hangs |= {"found", "forget"}
    monkeypatch.setattr(snapshot_lookup, "ray", found.ray)
    return found


def test_what_others_hold_is_told_at_once_if_the_node_refuses_a_connection(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[str]] = []

    def refusing(servers: list[object], timeout_s: float) -> set[object]:
        asked.append({one.node for one in servers})  # type: ignore[attr-defined]
        return set(servers)

    monkeypatch.setattr(snapshot_lookup, "refusing", refusing)
    monkeypatch.setattr(snapshot_lookup, "_PROMPT_S", 60.0)
    monkeypatch.setattr(snapshot_lookup, "_AT_ONCE_S", 2.0)  # the other one answers on busy cores, too
    begin = time.monotonic()
    found = snapshot_lookup.contents_of(nodes.ray.handles.values())  # type: ignore[arg-type]
    assert ([one.where[0] for one in found], asked) == (["a"], [{"b"}])
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("problem", [OSError, GetTimeoutError])
def test_a_node_of_which_nothing_can_be_found_out_is_waited_for(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, problem: type[Exception]
) -> None:
    def refusing(servers: list[object], timeout_s: float) -> set[object]:
        nodes.ray.handles["b"].hangs.clear()
        raise problem("too many open files")

    waiting = {nodes.ray.handles["b"].found.remote(): nodes.ray.handles["b"]}
    monkeypatch.setattr(snapshot_lookup, "refusing", refusing)
    snapshot_lookup._drop_lost(waiting)  # type: ignore[arg-type]
    assert len(waiting) == 1


def test_only_servers_that_have_answered_are_waited_for_when_old_snapshots_are_forgotten(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, handles, waited = nodes.clients["a"], nodes.ray.handles, list[int]()
    wait = nodes.ray.wait
    monkeypatch.setattr(nodes.ray, "wait", lambda refs, **named: waited.append(len(refs)) or wait(refs, **named))
    snapshot, stage = taken(1, DATA)
    handles["b"].is_dead = True
    client.found()
    client.forget(5, kept=snapshot)
    assert waited == [1]
    stage.close()
