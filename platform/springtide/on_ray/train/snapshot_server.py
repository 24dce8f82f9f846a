"""The snapshot server of a node: one small actor that holds shared memory after the rank that filled it is gone.

    rank --keep(pid, fd)--> server of its node: opens the memory itself --replicate--> servers of other nodes
    after a loss: every rank asks every server what it has; the newest step with all parts somewhere is read back

A server belongs to one run (its name has the digest of the run's URL), outlives worker groups, and ends itself when the run's
driver has been gone for a minute; its memory has no name anywhere and is freed with it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.checkpoint.format import MARK_BYTES, NO_STEP, Snapshot, file_of
from springtide.config import Config
from springtide.on_ray.cluster.nodes import staying
from springtide.on_ray.cluster.session import NAMESPACE
from springtide.on_ray.train.mailbox import MailboxClient
from springtide.on_ray.train.snapshot_lookup import ANSWER_S, contents_of, name_prefix, servers_named
from springtide.store import Folder
from springtide.store.free_memory import free_bytes

_CHUNK_BYTES = 32 * 2**20
_ALONE_S = 60.0
_LOOK_S = 5.0
_CANDIDATES = 4
"""Nodes without ranks, more than the copies need, on which servers are started to hold copies."""
if TYPE_CHECKING:  # a server's process needs no torch
    from springtide.checkpoint.staging import StagingBuffer

Key = tuple[int, int, int]
"""Term, step, rank."""
Place = tuple[int, int, bool, int]
"""Term, rank, whether it is a replica, and which of the rank's two staging buffers."""


class _Segment:
    """The mapped memory of a snapshot."""

    def __init__(self, fd: int, snapshot: Snapshot, writable: bool) -> None:
        self.fd, self.snapshot = fd, snapshot
        self.map = mmap.mmap(
            fd, MARK_BYTES + snapshot.size_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        )

    def mark(self, step: int) -> None:
        """As ``StagingBuffer.mark``."""
        self.map[:8] = step.to_bytes(8, "little", signed=True)

    @property
    def size_bytes(self) -> int:
        return len(self.map)

    @property
    def is_whole(self) -> bool:
        """Whether the memory holds the step of ``snapshot``: its rank may have died while it copied the next one."""
        return int.from_bytes(self.map[:8], "little", signed=True) == self.snapshot.meta.step

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a reader still has a view; the memory is freed with the last one
            self.map.close()
        os.close(self.fd)


class SnapshotServer:
    """The holder of one run's snapshots on one node."""

    def __init__(self, folder: str, limit_bytes: int | None, alone_s: float) -> None:
        """``limit_bytes``: None is half of the memory that the node has free now. ``alone_s``: see ``SnapshotClient``."""
        self._held: dict[Place, _Segment] = {}
        self._promised: dict[Place, int] = {}
        """Memory that is being opened or allocated [bytes]."""
        self._folder, self._is_chosen = folder, limit_bytes is not None
        self._limit = free_bytes() // 2 if limit_bytes is None else limit_bytes
        self._lock = threading.Lock()
        self._mailbox: MailboxClient | None = None
        threading.Thread(target=self._end_alone, args=(alone_s,), daemon=True).start()

    def follow(self, mailbox: MailboxClient) -> None:
        """Stay up as long as the run of ``mailbox`` does."""
        self._mailbox = mailbox

    def keep(
        self,
        snapshot: Snapshot,
        slot: int,
        pid: int,
        fd: int,
        peers: Sequence[ActorHandle[SnapshotServer]],
        needed_from: int = 0,
    ) -> None:
        """Hold the memory that process ``pid`` has open as ``fd``, and copy it to ``peers``. Snapshots of terms before
        ``needed_from`` are freed first. Raises OSError past the limit."""
        place, path = (snapshot.term, snapshot.rank, False, slot), f"/proc/{pid}/fd/{fd}"
        self.forget(needed_from)
        held = self._held.get(place)
        if held is None or os.stat(path).st_ino != os.fstat(held.fd).st_ino:
            with self._room(place, snapshot):
                held = self._put(place, _Segment(os.open(path, os.O_RDONLY), snapshot, writable=False))
        held.snapshot = snapshot
        if peers:
            with memoryview(held.map) as whole:
                for begin in range(MARK_BYTES, len(whole), _CHUNK_BYTES):
                    part = np.frombuffer(whole[begin : begin + _CHUNK_BYTES], dtype=np.uint8)
                    last, sent = begin + part.nbytes == len(whole), ray.put(part)
                    copies = [peer.replicate.remote(snapshot, slot, begin, sent, last, needed_from) for peer in peers]
                    ray.get(copies)

    def replicate(
        self, snapshot: Snapshot, slot: int, begin: int, part: np.ndarray, is_last: bool, needed_from: int = 0
    ) -> None:
        """Store a part of a peer's snapshot, from byte ``begin`` of its memory; ``needed_from`` is as in ``keep``."""
        place = snapshot.term, snapshot.rank, True, slot
        self.forget(needed_from)
        held = self._held.get(place)
        if held is None or held.size_bytes != MARK_BYTES + snapshot.size_bytes:
            with (
                self._room(place, snapshot),
                tempfile.TemporaryFile(dir=self._folder, buffering=0) as file,
            ):
                os.posix_fallocate(file.fileno(), 0, MARK_BYTES + snapshot.size_bytes)
                held = self._put(place, _Segment(os.dup(file.fileno()), snapshot, writable=True))
        if begin == MARK_BYTES:
            held.mark(NO_STEP)
            held.snapshot = snapshot
        held.map[begin : begin + part.nbytes] = part.data
        if is_last:
            held.mark(snapshot.meta.step)

    def forget(self, before: int, kept: tuple[int, int] | None = None) -> None:
        """Free the snapshots of terms before ``before``, except the one of term and step ``kept``."""
        with self._lock:
            for place, held in list(self._held.items()):
                if held.snapshot.term < before and (held.snapshot.term, held.snapshot.meta.step) != kept:
                    self._held.pop(place).close()

    def found(self) -> tuple[tuple[str, int], list[tuple[Snapshot, int]]]:
        """Return the node and process id of this server, because processes of the node open its memory themselves; and the
        whole snapshots held here, each with its file descriptor."""
        with self._lock:
            whole = [(held.snapshot, held.fd) for held in self._held.values() if held.is_whole]
        return (ray.get_runtime_context().get_node_id(), os.getpid()), whole

    def read(self, key: Key, begin: int, end: int) -> np.ndarray:
        """Return bytes of a snapshot, for a process on another node."""
        with self._lock:
            [held, *_] = [held for held in self._held.values() if held.snapshot.key == key and held.is_whole]
        return np.frombuffer(held.map[MARK_BYTES + begin : MARK_BYTES + end], dtype=np.uint8)

    def _put(self, place: Place, held: _Segment) -> _Segment:
        with self._lock:
            before, self._held[place] = self._held.get(place), held
        if before is not None:
            before.close()
        return held

    @contextlib.contextmanager
    def _room(self, place: Place, snapshot: Snapshot) -> Iterator[None]:
        """Reserve room for a snapshot while it is put into ``place``: concurrent calls do not get the same room. Raises OSError
        past the limit."""
        size = MARK_BYTES + snapshot.size_bytes
        with self._lock:
            taken = {other: held.size_bytes for other, held in self._held.items()} | self._promised
            wanted = sum(taken.values()) - taken.get(place, 0) + size
            if wanted > self._limit:
                allowed = "allows" if self._is_chosen else "= 'auto' is half of what the node had free,"
                raise OSError(
                    f"snapshots would take {wanted >> 20} MiB of a node, checkpoint.memory_bytes {allowed} "
                    f"{self._limit >> 20} MiB"
                )
            self._promised[place] = size
        try:
            yield
        finally:
            with self._lock:
                del self._promised[place]

    def _end_alone(self, alone_s: float) -> None:
        """End this process when the run's driver has been gone, or trained another run, for ``alone_s``."""
        seen = time.monotonic()
        while time.monotonic() - seen < alone_s:
            time.sleep(min(_LOOK_S, alone_s / 4))  # between polls
            with contextlib.suppress(Exception):  # the driver is gone, or the cluster itself is ending
                if self._mailbox is not None and self._mailbox.progress().get(ANSWER_S) is not None:
                    seen = time.monotonic()
        os._exit(0)


class _Origin(NamedTuple):
    """Where a snapshot is read from."""

    key: Key
    where: tuple[int, int] | ActorHandle[SnapshotServer]
    """Process and file descriptor on this node, else a server of another one."""
    size_bytes: int


class SnapshotClient:
    """A rank's client of its run's snapshot servers: the ``SnapshotStore`` of its snapshots."""

    def __init__(self, config: Config, run: Folder, mailbox: MailboxClient, alone_s: float = _ALONE_S) -> None:
        """``alone_s``: how long a server stays up without the run's driver, at the other end of ``mailbox`` [s]."""
        checkpoint, self._mailbox = config.checkpoint, mailbox
        self._prefix = name_prefix(run)
        limit = None if checkpoint.memory_bytes == "auto" else int(checkpoint.memory_bytes)
        self._arguments = (checkpoint.stage, limit, alone_s)
        self.node = ray.get_runtime_context().get_node_id()
        self._mine = self._server(self.node)
        self._copies = checkpoint.memory_copies
        self._ring: list[str] = []
        self._peers: list[ActorHandle[SnapshotServer]] = []
        self._chosen_s = 0.0
        self._asked: dict[str, ObjectRef] = {}
        """Other node -> the first answer of its server."""
        self._read_from: dict[str, _Origin] = {}
        self._slots: dict[int, int] = {}

    def wait(self) -> None:
        """Wait until the server of this node is up."""
        ray.get(self._mine.found.remote())

    def pair(self, nodes: Sequence[str]) -> None:
        """Choose peers among the nodes of all ranks: the next ones in a ring. If these are too few, other nodes with room for
        workers are added as soon as there are some: the snapshots of a group on one node would be lost with it."""
        self._ring = sorted(set(nodes))
        self._choose()

    def _choose(self) -> None:
        found = self._following()
        if len(found) < self._copies:
            others = [node for node in staying(with_room=True) if node not in self._ring]
            found += [node for node in others[: _CANDIDATES + self._copies] if self._stands(node)]
        self._peers = [self._server(node) for node in found[: self._copies]]
        self._chosen_s = time.monotonic()

    def _stands(self, node: str) -> bool:
        """Return whether the server of a node is up; if not, it is started. Does not wait: a new node may be busy."""
        if node not in self._asked:
            self._asked[node] = self._server(node).found.remote()
        return bool(ray.wait([self._asked[node]], timeout=0)[0])

    def evacuate(self) -> bool:
        """Choose peers again, among the nodes that stay: those of the ranks, or else any. Returns whether snapshots kept from
        now on outlive the nodes that leave."""
        stay = staying()
        found = [node for node in self._following() if node in stay]
        if not found:  # only then: the check starts servers, which takes CPU time from a leaving group
            found = [node for node in stay if node not in self._ring][: _CANDIDATES + self._copies]
            found.sort(key=lambda node: not self._stands(node))
        found = found[: max(1, self._copies)]
        self._peers = [self._server(node) for node in found]
        return bool(found) or self.node in stay

    def _following(self) -> list[str]:
        here = self._ring.index(self.node)
        return self._ring[here + 1 :] + self._ring[:here]

    def keep(self, snapshot: Snapshot, stage: StagingBuffer, needed_from: int) -> ObjectRef[None]:
        """Have the server of this node hold the staging buffer; returns a handle for ``settled``."""
        if self._ring and len(self._peers) < self._copies and time.monotonic() - self._chosen_s > _LOOK_S:
            self._choose()
        slot = self._slots.setdefault(stage.fd, len(self._slots) % 2)
        return self._mine.keep.remote(snapshot, slot, os.getpid(), stage.fd, self._peers, needed_from)

    def settled(self, handle: ObjectRef[None]) -> bool:
        """Return whether the server holds it and its peers have copies. Raises OSError if they cannot."""
        done, _ = ray.wait([handle], timeout=0)
        if not done:
            return False
        try:
            ray.get(handle)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ray.exceptions.RayActorError):  # a peer is gone; this node holds its part
                self._choose()
                return True
            cause = error.as_instanceof_cause()
            raise OSError(str(getattr(cause, "cause", cause))) from None
        except ray.exceptions.RayError as error:  # a server is gone, with its node or alone
            raise OSError(str(error).splitlines()[0]) from None
        return True

    def forget(self, before: int, kept: Snapshot | None = None) -> None:
        """As ``SnapshotStore.forget``; a server that does not answer keeps what it has until another call reaches it."""
        what = None if kept is None else (kept.term, kept.meta.step)
        asked = [server.forget.remote(before, what) for server in servers_named(self._prefix)]
        if kept is not None and asked:
            ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)

    def found(self) -> list[Snapshot]:
        """Return the whole snapshots of the servers that answer. Each is read from this node if possible, else preferably from
        one that stays."""
        stay, places = staying(), contents_of(servers_named(self._prefix))
        places.sort(key=lambda place: (place[0][0] != self.node, place[0][0] not in stay))
        self._read_from = {}
        for (node, pid), held, server in places:
            for snapshot, fd in held:
                where = (pid, fd) if node == self.node else server
                self._read_from.setdefault(file_of(snapshot.key), _Origin(snapshot.key, where, snapshot.size_bytes))
        return [snapshot for _, held, _ in places for snapshot, _ in held]

    def source(self, snapshots: Sequence[Snapshot]) -> _Source:
        """Return a source that reads ``snapshots`` from where ``found`` last saw them; the next call searches again. Raises
        OSError if one is nowhere."""
        if not self._read_from:
            self.found()
        known, self._read_from = self._read_from, {}
        try:
            return _Source({file_of(snapshot.key): known[file_of(snapshot.key)] for snapshot in snapshots})
        except KeyError as error:
            raise OSError(f"the snapshot {error} is gone") from None

    def _server(self, node: str) -> ActorHandle[SnapshotServer]:
        options = {
            "name": f"{self._prefix}{node}",
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "lifetime": "detached",
            "num_cpus": 0,
            "max_concurrency": 16,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        server = ray.remote(SnapshotServer).options(**options).remote(*self._arguments)
        server.follow.remote(self._mailbox)
        return server


class _Source:
    """The bytes of snapshots: maps memory of this node, requests that of other nodes from their servers."""

    def __init__(self, origins: dict[str, _Origin]) -> None:
        self._origins = origins
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()

    def stream(self, name: str, begin: int, end: int) -> Iterator[memoryview]:
        yield self._read(name, begin, end)

    def _read(self, name: str, begin: int, end: int) -> memoryview:
        key, where, size_bytes = self._origins[name]
        if isinstance(where, tuple):
            with self._lock:
                if name not in self._maps:
                    pid, fd = where
                    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
                    self._maps[name] = mmap.mmap(opened, MARK_BYTES + size_bytes, access=mmap.ACCESS_READ)
                    os.close(opened)
            return memoryview(self._maps[name])[MARK_BYTES + begin : MARK_BYTES + end]
        try:
            return memoryview(ray.get(where.read.remote(key, begin, end)))
        except ray.exceptions.RayError as error:
            raise OSError(f"the snapshot {name} is gone: {error}") from None

    def size(self, name: str) -> int:
        return self._origins[name].size_bytes


@contextlib.contextmanager
def snapshot_servers_follow(run: Folder, mailbox: MailboxClient) -> Iterator[None]:
    """Keep the run's servers up for the block, an earlier driver's too, and end them with it. After an error they stay: a
    driver that resumes within a minute finds them."""
    for server in servers_named(name_prefix(run)):
        server.follow.remote(mailbox)
    yield
    for server in servers_named(name_prefix(run)):
        ray.kill(server)
