"""Snapshots are copied to other nodes whatever these do: many ranks a node, servers that hang, fail or die, memory that
changes. The servers are real, in threads of this process; Ray is not there."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_pools import WAIT_S, Nodes, taken

from springtide.checkpoint.format import BadFile, Meta, StagedPiece
from springtide.checkpoint.load import read_into
from springtide.checkpoint.snapshot_parts import Snapshot, SnapshotPart, file_of
from springtide.ray.train import snapshot_client, snapshot_server
from springtide.ray.train.snapshot_client import SnapshotClient
from springtide.ray.train.snapshot_server import SnapshotServer
from springtide.storage import Folder

DATA = bytes(range(200))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    """Makes clusters of nodes; a chunk is 64 bytes there."""
    monkeypatch.setattr(snapshot_server, "_CHUNK_BYTES", 64)
    made: list[Nodes] = []

    def make(names: str, **options: Any) -> Nodes:
        made.append(Nodes(monkeypatch, names, Folder(tmp_path), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def only(monkeypatch: pytest.MonkeyPatch, stay: list[str], accept: list[str] | None = None) -> None:
    """Have only these nodes stay, and of them only those that ``accept`` take new actors, if that is given."""
    monkeypatch.setattr(snapshot_client, "staying", lambda: stay)
    monkeypatch.setattr(snapshot_client, "accepting", lambda with_room=False: stay if accept is None else accept)


def held(nodes: Nodes, node: str, step: int, data: bytes = DATA) -> None:
    """Have the client of ``node`` keep a snapshot, and wait until it is safe. Raises OSError if it cannot be."""
    snapshot, stage = taken(step, data)
    client = nodes.clients[node]
    handle = client.keep(snapshot, stage, 0)
    handle.exception(WAIT_S)
    assert client.settled(handle)
    stage.close()


def read(client: SnapshotClient, part: SnapshotPart, weight: torch.Tensor) -> None:
    """Read a tensor as a restore does. Raises BadFile if the copy is not what its rank described."""
    source = client.source([part])
    read_into(source, source.table([part]).pieces(), {"model/weight": weight})


def test_more_ranks_than_threads_do_not_block_each_other(cluster: Any) -> None:
    """More ranks on a node than threads do not wait for each other."""
    nodes = cluster("ab", threads=2)
    a, b = nodes.ray.handles["a"], nodes.ray.handles["b"]
    parts = [taken(1, DATA, rank, 16) for rank in range(16)]
    kept = [
        (a if rank < 8 else b).keep.remote(part, 0, os.getpid(), stage.fd, [b if rank < 8 else a])
        for rank, (part, stage) in enumerate(parts)
    ]
    assert [one.result(WAIT_S) for one in kept] == [[""]] * 16
    for handle in (a, b):
        assert sum(one.is_whole for one in handle.server._held.values()) == 16
    for _, stage in parts:
        stage.close()


@pytest.mark.parametrize(("torn", "whole"), [("b", "ad"), ("bd", "ac")])
def test_of_two_copies_a_failed_one_does_not_count(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, torn: str, whole: str
) -> None:
    """With two copies one that fails in the middle does not count."""
    nodes, replicate = cluster("abcd", copies=2), SnapshotServer.replicate
    fails = {nodes.ray.handles[name].server for name in torn}

    def failing(server: SnapshotServer, snapshot: Any, slot: int, begin: int, *rest: Any) -> None:
        if server in fails and begin > 64:
            raise OSError("snapshots would take 2 MiB of a node")
        replicate(server, snapshot, slot, begin, *rest)

    monkeypatch.setattr(SnapshotServer, "replicate", failing)
    held(nodes, "a", 1)
    assert nodes.whole(1) == whole


def test_a_snapshot_without_another_node_is_not_safe(cluster: Any) -> None:
    """A snapshot that no other node can copy is not safe and says why."""
    nodes = cluster("ab")
    nodes.ray.handles["b"].is_dead = True
    with pytest.raises(OSError, match="node b "):
        held(nodes, "a", 1)
    with pytest.raises(OSError, match="other node"):
        held(nodes, "a", 2)  # b is left out for a while, which does not make one copy two


def test_a_group_on_one_node_keeps_its_snapshots_there(cluster: Any) -> None:
    nodes = cluster("a")
    held(nodes, "a", 1)
    assert nodes.whole(1) == "a"


def test_a_group_on_one_node_has_copies_elsewhere(cluster: Any) -> None:
    """A group on one node has its copies on another that is up."""
    nodes = cluster("abc")
    client = nodes.clients["a"]
    client.pair(["a"])
    for asked in client._asked.values():
        asked.exception(WAIT_S)  # they are up now
    client.pair(["a"])
    nodes.ray.handles["b"].is_dead = True
    held(nodes, "a", 1)
    assert nodes.whole(1) == "ac"
    nodes.ray.handles["c"].is_dead = True
    held(nodes, "a", 2)  # there is nowhere else
    assert nodes.whole(2) == "a"


def test_a_hung_server_elsewhere_is_replaced(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server that hangs is replaced and this nodes own is told."""
    monkeypatch.setattr(snapshot_server, "_COPY_S", 2.0)
    nodes = cluster("abc")
    nodes.ray.handles["b"].hangs.add("replicate")
    held(nodes, "a", 1)
    assert nodes.whole(1) == "ac"
    calls = len(nodes.ray.handles["b"].calls)
    held(nodes, "a", 2)
    assert len(nodes.ray.handles["b"].calls) == calls  # not asked again at each step
    monkeypatch.setattr(snapshot_client, "_KEEP_S", 0.05)
    nodes.ray.handles["a"].hangs.add("keep")
    with pytest.raises(OSError, match="this node"):
        held(nodes, "a", 3)


def test_a_server_that_has_ended_is_started_again(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = cluster("ab")
    dead = nodes.ray.handles["a"]
    dead.is_dead = True
    again = type(dead)("a")
    nodes.ray.handles["a"] = again  # as Ray does when it is asked for the name
    held(nodes, "a", 1)
    assert nodes.whole(1) == "ab"
    assert dead.calls[-1] == "keep"


def test_rank_0_queries_the_servers_for_all_ranks(cluster: Any) -> None:
    """Rank 0 asks the servers and the others read where it says."""
    nodes = cluster("abc")
    held(nodes, "a", 7)
    before = nodes.asked
    [found] = nodes.clients["c"].found()
    assert {place.node for place in found.held_at} == {"a", "b"}
    for client in nodes.clients.values():
        data = b"".join(bytes(part) for part in client.source([found]).stream(file_of(found.key), 0, len(DATA)))
        assert data == DATA
    assert nodes.asked == before + 1


def test_bytes_that_have_changed_are_read_from_another_copy(cluster: Any) -> None:
    nodes = cluster("abc")
    held(nodes, "b", 7)
    spoilt = nodes.ray.handles["c"].server
    [copy] = spoilt._held.values()
    copy.map[100] ^= 1
    client = nodes.clients["c"]
    [found] = client.found()
    weight = torch.zeros(len(DATA), dtype=torch.uint8)
    with pytest.raises(BadFile) as error:
        read(client, found, weight)
    client.exclude(error.value.file)
    read(client, found, weight)
    assert bytes(weight.numpy()) == DATA


def test_foreign_pieces_are_read_from_another_server(cluster: Any) -> None:
    """Pieces that are not those of the rank are told by another server."""
    nodes = cluster("abc")
    held(nodes, "b", 7)
    client, lies = nodes.clients["c"], nodes.ray.handles["c"].server
    [copy] = lies._held.values()
    table = copy.snapshot.table
    copy.snapshot = dataclasses.replace(copy.snapshot, table=table._replace(boxes=table.boxes + 1))
    [found] = client.found()
    source = client.source([found])
    with pytest.raises(BadFile, match=r"digest .*expected") as error:
        source.table([found])
    client.exclude(error.value.file)
    weight = torch.zeros(len(DATA), dtype=torch.uint8)
    read(client, found, weight)
    assert bytes(weight.numpy()) == DATA
    nodes.ray.handles["b"].server.forget(10**9)
    with pytest.raises(OSError, match="snapshot 1-7-0"):
        client.source([found]).table([found])


def test_a_place_with_other_pieces_is_ignored(cluster: Any) -> None:
    """A place that tells of other pieces than the first is none."""
    nodes = cluster("abc")
    held(nodes, "a", 7)
    [copy] = nodes.ray.handles["b"].server._held.values()
    copy.snapshot = dataclasses.replace(copy.snapshot, table_digest="0" * 32)
    [found] = nodes.clients["c"].found()
    assert [place.node for place in found.held_at] == ["a"]


def test_a_look_up_asks_each_holder_for_pieces_once(cluster: Any) -> None:
    """A look up tells no pieces and each holder is asked for them once.

    A server of a large group holds tens of thousands of pieces, and tells those of the chosen parts only."""
    nodes, sizes = cluster("ab"), []
    for pieces in (1, 1000):
        meta = Meta(step=7, tokens=7, world_size=16, order_identity="o", config_fingerprint="c")
        staged = [StagedPiece("model/weight", "U8", (pieces,), (at,), (1,), at, 1) for at in range(pieces)]
        digests = [("0" * 32,)] * pieces
        parts = [Snapshot.of(1, rank, meta, staged, 1000, digests) for rank in range(16)]
        sizes.append(len(pickle.dumps([part.part for part in parts])))
    assert sizes[0] == sizes[1] < 8000
    kept = [taken(7, DATA, rank, 16) for rank in range(16)]
    a, b = nodes.ray.handles["a"], nodes.ray.handles["b"]
    for rank, (snapshot, stage) in enumerate(kept):
        (a if rank % 2 else b).keep.remote(snapshot, 0, os.getpid(), stage.fd, []).result(WAIT_S)
    client = nodes.clients["a"]
    found = sorted(client.found(), key=lambda part: part.rank)
    a.calls.clear(), b.calls.clear()
    table = client.source(found).table(found[:6])
    assert len(table.pieces()) == 6
    assert (a.calls, b.calls) == (["pieces"], ["pieces"])
    for _, stage in kept:
        stage.close()


def test_memory_of_another_group_is_not_a_snapshot(cluster: Any) -> None:
    """Memory of another group of the same step and size is not taken for a snapshot."""
    nodes = cluster("ab")
    snapshot, stage = taken(7, DATA)
    stage.mark(7, b"h" * 16)  # the descriptor is another group's by now
    client = nodes.clients["a"]
    assert client.keep(snapshot, stage, 0).exception(WAIT_S) is None
    assert nodes.ray.handles["a"].server._held
    assert "a" not in nodes.whole(7)
    stage.close()


def test_a_chunk_that_comes_late_does_not_spoil_a_newer_copy(cluster: Any) -> None:
    nodes = cluster("ab")
    server = nodes.ray.handles["b"].server
    held(nodes, "a", 1)
    held(nodes, "a", 3)  # in the same slot
    late, stage = taken(1, DATA)
    for begin, message in ((64, "holds step 3 by now"), (128, "holds step 3 by now")):
        with pytest.raises(OSError, match=message):
            server.replicate(late, 1, begin, stage._bytes.numpy()[:64], False)
    assert nodes.whole(3) == "ab"
    stage.close()


def test_a_rank_without_bytes_has_a_copy_elsewhere(cluster: Any) -> None:
    """A rank without a byte of its own has a copy elsewhere too."""
    nodes = cluster("ab")
    held(nodes, "a", 1, b"")
    assert nodes.whole(1) == "ab"


def test_the_only_staying_node_starts_no_server_elsewhere(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only node that stays starts no server elsewhere while its group leaves.

    What leaves copies its parts there: the state is whole on it. A new server takes seconds that may not be left."""
    nodes = cluster("abc")
    for name in "ab":
        nodes.clients[name].pair(["a", "b"])
    only(monkeypatch, ["a", "c"])
    nodes.ray.handles["c"].hangs = {"found", "replicate"}
    nodes.ray.handles["c"].calls.clear()
    assert nodes.clients["a"].evacuate(nodes.clients["a"].staying())
    held(nodes, "a", 2)
    assert nodes.ray.handles["c"].calls == []
    assert nodes.clients["b"].evacuate(nodes.clients["b"].staying())
    assert [*nodes.clients["b"]._peers] == ["a"]


def test_copies_prefer_another_zone_and_nodes_without_ranks(cluster: Any) -> None:
    """Copies are in another zone and a node without ranks in another zone comes first."""
    nodes = cluster("abcd", zones="eeww")
    for name, client in nodes.clients.items():
        held(nodes, name, 1)
        assert nodes.domains[name] not in [nodes.domains[peer] for peer in client._peers]
        nodes.close()
    nodes = cluster("abc", zones="eew", group="a")
    client = nodes.clients["a"]
    for asked in client._asked.values():
        asked.exception(WAIT_S)  # they are up now
    client.pair(["a"], [("e",)])
    assert [*client._peers] == ["c"]


def test_after_a_notice_copies_go_to_nodes_that_stay(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a notice copies go to nodes that stay and to those that join later."""
    nodes = cluster("abcd", group="abc")
    client = nodes.clients["a"]
    assert [*client._peers] == ["b"]
    only(monkeypatch, ["a", "c"])
    assert client.evacuate(client.staying())
    held(nodes, "a", 1)
    assert nodes.whole(1) == "ac"
    only(monkeypatch, ["a", "d"])
    for asked in client._asked.values():
        asked.exception(WAIT_S)
    assert client.evacuate(client.staying())
    client._choose()  # starts a server on the node that has joined
    client._asked["d"].exception(WAIT_S)
    client._choose()
    held(nodes, "a", 2)
    assert nodes.whole(2) == "ad"


def test_a_node_leaving_in_hours_holds_copies_if_served(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are on a node that leaves in hours only where its server is up."""
    nodes = cluster("abc", group="ab")
    leaving, other = nodes.clients["a"], nodes.clients["b"]
    only(monkeypatch, ["b", "c"], accept=[])
    assert leaving.evacuate(leaving.staying())
    assert [*leaving._peers] == ["b"]  # of the group: its server stands
    only(monkeypatch, ["c"], accept=[])
    assert not other.evacuate(other.staying())  # Ray starts none on c
