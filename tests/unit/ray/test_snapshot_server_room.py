"""What a node's server has room for, on its own: real shared memory, no Ray. Eight workers a node, as llama3_8b has on 64 GPUs:
sizes are those, a millionth of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from snapshot_pools import WAIT_S, Handle

from springtide import config as configs
from springtide.checkpoint.format import Meta
from springtide.checkpoint.shared_memory import MARK_BYTES
from springtide.checkpoint.snapshot_parts import Snapshot
from springtide.checkpoint.staging import StagingBuffer
from springtide.ray.train import snapshot_client
from springtide.ray.train.snapshot_client import SnapshotClient
from springtide.ray.train.snapshot_server import SnapshotServer
from springtide.storage import Folder
from springtide.storage.host_limits import free_bytes

WORKERS = 8
STATE_BYTES = 96_400
LIMIT_BYTES = 68_700


class Nodes:
    """So many of eight ranks each; each node's peer is the next."""

    def __init__(self, servers: list[SnapshotServer], term: int) -> None:
        self.servers, self.term = servers, term
        self.ranks = WORKERS * len(servers)
        self.size = STATE_BYTES // self.ranks
        self.stages: dict[tuple[int, int], StagingBuffer] = {}

    def snapshot(self, step: int, needed_from: int) -> None:
        """Of all ranks, copied to their peers."""
        meta = Meta(step=step, tokens=step, world_size=self.ranks, order_identity="o", config_fingerprint="c")
        for rank in range(self.ranks):
            node, slot = rank // WORKERS, step % 2
            stage = self.stages.setdefault((rank, slot), StagingBuffer("/dev/shm", self.size))
            stage.mark(step)
            snapshot = Snapshot.of(self.term, rank, meta, (), self.size)
            self.servers[node].keep(snapshot, slot, os.getpid(), stage.fd, [], needed_from)
            peer, part = self.servers[(node + 1) % len(self.servers)], stage._bytes.numpy()
            peer.replicate(snapshot, slot, MARK_BYTES, part, True, needed_from)

    def whole(self, term: int, step: int) -> int:
        """How many parts of a snapshot there are, copies included."""
        held = [one for server in self.servers for one in server._held.values() if one.is_whole]
        return sum((one.snapshot.term, one.snapshot.meta.step) == (term, step) for one in held)

    def close(self) -> None:
        for stage in self.stages.values():
            stage.close()


@pytest.fixture
def servers() -> Iterator[list[SnapshotServer]]:
    made = [SnapshotServer("/dev/shm", LIMIT_BYTES, math.inf) for _ in range(8)]
    yield made
    for server in made:
        server.forget(10**9)


def test_a_resize_keeps_the_restored_snapshot_until_the_next(servers: list[SnapshotServer]) -> None:
    """Snapshots go on after a resize and the restored one is there until the next is safe."""
    before = Nodes(servers, term=1)
    before.snapshot(10, needed_from=0)
    before.snapshot(11, needed_from=1)
    held = sum(one.size_bytes for one in servers[0]._held.values())
    assert 0.7 * LIMIT_BYTES < held < 0.75 * LIMIT_BYTES  # 48.2 of 68.7
    before.close()

    # a node goes, 56 ranks restore step 11 and are at lease 2
    for server in servers[:7]:
        server.forget(2, kept=(1, 11))
    after = Nodes(servers[:7], term=2)
    assert after.whole(1, 10) == 0
    after.snapshot(12, needed_from=0)
    assert after.whole(1, 11) == 7 * WORKERS * 2
    after.snapshot(13, needed_from=2)
    assert after.whole(1, 11) == 0
    assert (after.whole(2, 12), after.whole(2, 13)) == (112, 112)
    after.close()


def test_without_that_the_resize_is_past_the_limit(servers: list[SnapshotServer]) -> None:
    before, after = Nodes(servers, term=1), Nodes(servers[:7], term=2)
    before.snapshot(10, needed_from=0)
    before.snapshot(11, needed_from=1)
    with pytest.raises(OSError, match=r"checkpoint.memory_bytes allows 0 MiB"):
        after.snapshot(12, needed_from=0)
    before.close()
    after.close()


def test_who_asks_at_once_does_not_get_the_same_room_twice() -> None:
    """Eight workers of a node hand over their snapshots together."""
    server = SnapshotServer("/dev/shm", 2 * (1000 + MARK_BYTES), math.inf)
    meta = Meta(step=1, tokens=1, world_size=3, order_identity="o", config_fingerprint="c")
    first, second, third = (Snapshot.of(1, rank, meta, (), 1000) for rank in range(3))
    with (
        server._room((1, 0, False, 0), first),
        server._room((1, 1, False, 0), second),
        pytest.raises(OSError, match="snapshots"),
        server._room((1, 2, False, 0), third),
    ):
        raise AssertionError("there is none")
    with server._room((1, 2, False, 0), third):  # the others were never put there
        pass


def written(folder: Path, **files: str) -> str:
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ({}, 1000 * 1024),
        ({"memory__max": "max\n", "memory__current": "5\n", "memory__stat": "inactive_file 7\n"}, 1000 * 1024),
        ({"memory__max": "9000\n", "memory__current": "5000\n", "memory__stat": "anon 1\ninactive_file 700\n"}, 4700),
        ({"memory__max": "4000\n", "memory__current": "5000\n", "memory__stat": "inactive_file 7\n"}, 0),
    ],
)
def test_free_memory_is_limited_by_the_container(tmp_path: Path, cgroup: dict[str, str], expected: int) -> None:
    """What is free is the kernels word and no more than the containers."""
    proc = written(
        tmp_path / "proc", meminfo="MemTotal:       9999 kB\nMemAvailable:   1000 kB\nHugePages_Total:   0\n"
    )
    assert free_bytes(proc, written(tmp_path / "cgroup", **cgroup)) == expected


def test_a_server_without_a_limit_takes_half_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot server that is given no limit takes half of what is free."""
    monkeypatch.setattr("springtide.ray.train.snapshot_server.free_bytes", lambda: 2 * (1000 + MARK_BYTES))
    server = SnapshotServer("/dev/shm", None, math.inf)
    meta = Meta(step=1, tokens=1, world_size=2, order_identity="o", config_fingerprint="c")
    with server._room((1, 0, False, 0), Snapshot.of(1, 0, meta, (), 1000)):
        pass
    with (
        pytest.raises(OSError, match=r"checkpoint\.memory_bytes = 'auto'"),
        server._room((1, 0, False, 0), Snapshot.of(1, 0, meta, (), 1001)),
    ):
        raise AssertionError("there is none")


def test_a_resumed_run_sets_the_limit_of_an_old_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank of a resumed run sets the limit of a server that still stands."""
    server = Handle("a", threads=1, limit_bytes=64 * 2**20)
    actor = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *arguments: server))
    ray = SimpleNamespace(
        remote=lambda **options: lambda kind: actor,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "a" * 56),
    )
    monkeypatch.setattr(snapshot_client, "ray", ray)
    config = configs.recipes.tiny().override({"checkpoint.memory_bytes": 4 * 2**30})
    SnapshotClient(config, Folder(tmp_path), None)  # type: ignore[arg-type]  # nobody follows it
    server.forget.remote(0).result(WAIT_S)  # its one thread has answered what came before
    meta = Meta(step=1, tokens=1, world_size=1, order_identity="o", config_fingerprint="c")
    with server.server._room((1, 0, False, 0), Snapshot.of(1, 0, meta, (), 100 * 2**20)):
        pass


def test_an_auto_limit_counts_memory_without_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is auto again is half of what is free without snapshots and stays."""
    room = 1000 + MARK_BYTES
    free = [3 * room]
    monkeypatch.setattr("springtide.ray.train.snapshot_server.free_bytes", lambda: free[0])
    server, stage = SnapshotServer("/dev/shm", room, math.inf), StagingBuffer("/dev/shm", 1000)
    meta = Meta(step=1, tokens=1, world_size=2, order_identity="o", config_fingerprint="c")
    first, second, larger = (Snapshot.of(1, rank, meta, (), size) for rank, size in ((0, 1000), (1, 1000), (1, 1001)))
    stage.mark(1)
    server.keep(first, 0, os.getpid(), stage.fd, [])
    with pytest.raises(OSError, match=r"memory_bytes allows"), server._room((1, 1, False, 0), second):
        raise AssertionError("there is none")
    for free[0] in (3 * room, 0):
        server.limit(None)
        with server._room((1, 1, False, 0), second):
            pass
        with pytest.raises(OSError, match=r"memory_bytes = 'auto' is"), server._room((1, 1, False, 0), larger):
            raise AssertionError("there is none")
    server.forget(2)
    stage.close()
