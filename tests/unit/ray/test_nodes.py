"""Which nodes answer: real sockets stand for raylets, and Ray's table of nodes is faked."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from springtide.preemption.notices import TimeLeft
from springtide.ray.cluster import nodes
from springtide.ray.cluster.nodes import NodeDeadlines, observed, unanswering

LOOPBACK = "127.0.0.1"


def table(monkeypatch: pytest.MonkeyPatch, addresses: dict[str, tuple[str, int]], alive: bool = True) -> list[int]:
    """Make Ray list ``addresses``; returns a list that grows with each look at them."""
    rows = [
        {"NodeID": name, "Alive": alive, "NodeManagerAddress": host, "NodeManagerPort": port}
        for name, (host, port) in addresses.items()
    ]
    looks = list[int]()

    def listed() -> list[dict[str, object]]:
        looks.append(1)
        return rows

    monkeypatch.setattr(nodes.ray, "nodes", listed)
    return looks


@dataclasses.dataclass(frozen=True)
class Actor:
    """The handle of an actor."""

    _actor_id: bytes


@pytest.fixture
def raylet() -> Iterator[socket.socket]:
    """A socket that listens."""
    with socket.create_server((LOOPBACK, 0), backlog=128) as listening:
        yield listening


@pytest.fixture
def full() -> Iterator[tuple[socket.socket, list[socket.socket]]]:
    """A socket that listens and drops what arrives: its queue is full. The connections that fill it come with it."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=0))
        queued = list[socket.socket]()
        while True:
            one = stack.enter_context(socket.socket())
            one.settimeout(0.2)
            try:
                one.connect(listening.getsockname())
            except TimeoutError:
                break
            queued.append(one)
        yield listening, queued


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listening:
        return int(listening.getsockname()[1])


def test_a_node_answers_refuses_or_is_not_known(monkeypatch: pytest.MonkeyPatch, raylet: socket.socket) -> None:
    looks = table(monkeypatch, {"up": raylet.getsockname(), "down": (LOOPBACK, free_port())})
    assert unanswering(["up", "down", "unknown"]) == {"down", "unknown"}
    assert len(looks) == 1
    assert unanswering([]) == set()
    assert len(looks) == 1  # nothing to look for
    table(monkeypatch, {"up": raylet.getsockname()}, alive=False)
    assert unanswering(["up"]) == {"up"}


def test_an_actor_is_lost_where_its_node_refuses_and_may_be_up_where_it_is_silent(
    monkeypatch: pytest.MonkeyPatch, raylet: socket.socket, full: tuple[socket.socket, list[socket.socket]]
) -> None:
    listening, _ = full
    where = {"up": raylet.getsockname(), "down": (LOOPBACK, free_port()), "silent": listening.getsockname()}
    table(monkeypatch, where)
    actors = {name: Actor(name.encode()) for name in (*where, "gone", "starts")}
    entries = {
        one._actor_id.hex(): {"State": "PENDING_CREATION" if name == "starts" else "ALIVE", "Address": {"NodeID": name}}
        for name, one in actors.items()
    }
    monkeypatch.setattr(nodes.state, "actor_table", entries.__getitem__)
    found = nodes.refusing(actors.values(), 0.1)  # type: ignore[arg-type]
    assert found == {actors["down"], actors["gone"]}


def test_the_nodes_of_many_actors_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand servers that do not answer at once held up a restart by a request for each."""
    actors = [Actor(number.to_bytes(4, "big")) for number in range(1000)]
    entries = {one._actor_id.hex(): {"State": "ALIVE", "Address": {"NodeID": "down"}} for one in actors[1:]}
    table(monkeypatch, {"down": (LOOPBACK, free_port())})
    asked = list[tuple[object, ...]]()
    monkeypatch.setattr(nodes.state, "actor_table", lambda *which: asked.append(which) or entries)
    assert nodes.refusing(actors, 0.1) == set(actors[1:])  # type: ignore[arg-type]
    assert asked == [(None, None, "ALIVE")]


def test_a_node_that_is_silent_twice_is_lost_and_one_that_is_silent_once_is_not(
    monkeypatch: pytest.MonkeyPatch, full: tuple[socket.socket, list[socket.socket]]
) -> None:
    listening, queued = full
    monkeypatch.setattr(nodes, "_ANSWER_S", 0.1)
    table(monkeypatch, {"busy": listening.getsockname()})
    assert unanswering(["busy"]) == {"busy"}
    tried, connect = list[set[str]](), nodes._connect

    def lossy(addresses: dict[str, tuple[str, int]], timeout_s: float, hello: bytes) -> dict[str, int]:
        found = connect(addresses, timeout_s, hello)
        if not tried:  # room for the second try
            for _ in queued:
                listening.accept()[0].close()
        tried.append(set(addresses))
        return found

    monkeypatch.setattr(nodes, "_connect", lossy)
    assert unanswering(["busy"]) == set()
    assert tried == [{"busy"}, {"busy"}]


@contextlib.contextmanager
def files_left(number: int) -> Iterator[None]:
    """Let this process open only ``number`` more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, before[1]))
    held = list[int]()
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(number):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in held:
            os.close(one)


def test_a_driver_short_of_files_does_not_take_nodes_for_lost(
    monkeypatch: pytest.MonkeyPatch, raylet: socket.socket
) -> None:
    names = [f"node-{number}" for number in range(100)]
    table(monkeypatch, dict.fromkeys(names, raylet.getsockname()))
    with files_left(10):
        assert unanswering(names) == set()
    with files_left(1), pytest.raises(OSError, match="Too many open files"):
        unanswering(names)


def test_a_node_has_as_many_places_as_fit_into_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.state, "get_draining_nodes", lambda: {"b": 0})
    rows = [{"NodeID": "a"}, {"NodeID": "b"}, {"NodeID": "c"}]
    a, b, c = observed(
        rows, {"a": {"CPU": 5.0, "GPU": 3.0}, "b": {"CPU": 1.0}}, {"CPU": 2.0, "GPU": 1.0}, NodeDeadlines()
    )
    assert (a.places, b.places, c.places) == (2, 0, 0)
    assert a.leaves_at is None
    assert b.leaves_at is not None


def test_a_node_that_leaves_in_hours_stays_but_takes_no_new_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"NodeID": name, "Alive": True, "Resources": {"CPU": 1.0} if name != "d" else {}} for name in "abcd"]
    monkeypatch.setattr(nodes.ray, "nodes", lambda: rows)
    monkeypatch.setattr(nodes.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    in_hours, soon = (int((time.time() + hours * 3600) * 1000) for hours in (7.0, 0.5))
    monkeypatch.setattr(nodes.state, "get_draining_nodes", lambda: {"a": in_hours, "b": soon, "c": 0})
    assert nodes.staying() == ["a", "d"]
    assert nodes.leaving("abcd") == {"b", "c"}
    monkeypatch.setattr(nodes.state, "get_draining_nodes", lambda: {"b": in_hours, "c": soon})
    assert nodes.staying() == ["a", "b", "d"]
    assert nodes.accepting() == ["a", "d"]
    assert nodes.accepting(with_room=True) == ["a"]


def test_three_workers_fit_into_three_times_what_one_needs_whatever_the_sum_rounds_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes.state, "get_draining_nodes", dict)
    assert 3 * 0.7 < 2.1
    [a] = observed([{"NodeID": "a"}], {"a": {"CPU": 3 * 0.7}}, {"CPU": 0.7}, NodeDeadlines())
    assert a.places == 3


@pytest.mark.parametrize("ahead_s", [-3600.0, -5.0, 0.0, 5.0])
def test_a_deadline_is_as_far_away_as_the_node_itself_says_whatever_the_drivers_clock_shows(
    monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """A driver 5 s behind took what was left for 5 s more, which is all of ``elastic.reserve``."""
    of_node_s = 1_800_000_000.0
    monkeypatch.setattr(nodes, "time", SimpleNamespace(time=lambda: of_node_s + ahead_s, monotonic=lambda: 1000.0))
    deadline_ms = int((of_node_s + 30.0) * 1000)
    monkeypatch.setattr(nodes.state, "get_draining_nodes", lambda: {"a": deadline_ms})
    [a] = observed([{"NodeID": "a"}], {}, {"CPU": 1.0}, NodeDeadlines(lambda: {"a": TimeLeft(deadline_ms, 30.0)}))
    assert a.leaves_at == 1030.0
    # somebody else has told Ray another one, by a clock that is not known: the earlier of both counts
    [a] = observed([{"NodeID": "a"}], {}, {"CPU": 1.0}, NodeDeadlines(lambda: {"a": TimeLeft(deadline_ms + 1, 30.0)}))
    assert a.leaves_at == pytest.approx(min(1030.0, 1030.0 - ahead_s), abs=0.01)
    [a] = observed([{"NodeID": "a"}], {}, {"CPU": 1.0}, NodeDeadlines())
    assert a.leaves_at == pytest.approx(1030.0 - ahead_s, abs=0.01)


def test_a_drain_without_a_deadline_counts_from_when_it_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(nodes, "time", SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0]))
    draining = {"a": 0, "b": -1}
    monkeypatch.setattr(nodes.state, "get_draining_nodes", lambda: draining)
    deadlines = NodeDeadlines()
    first = deadlines.leaves_at()
    now[0] += 30.0
    assert deadlines.leaves_at() == first == {"a": 1120.0, "b": 1120.0}, "else it would never come"
    del draining["a"]
    assert deadlines.leaves_at() == {"b": 1120.0}
    draining["a"] = 0  # announced again
    assert deadlines.leaves_at()["a"] == 1150.0


def test_what_nodes_say_is_asked_for_only_while_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.state, "get_draining_nodes", dict)

    def never() -> dict[str, TimeLeft]:
        raise AssertionError

    [a] = observed([{"NodeID": "a"}], {}, {"CPU": 1.0}, NodeDeadlines(never))
    assert a.leaves_at is None
