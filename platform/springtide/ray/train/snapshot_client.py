"""A rank's client of its run's snapshot servers. Each node has one such server, which holds snapshots (copies of the training
state) in its memory. A rank uses the client to store its snapshots, to copy them to other nodes, and to read the snapshots of a
lost group."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.checkpoint.piece_table import PieceTable
from springtide.checkpoint.shared_memory import MARK_BYTES, HeldAt
from springtide.checkpoint.snapshot_parts import Snapshot, SnapshotKey, SnapshotPart, file_of
from springtide.checkpoint.staging import StagingBuffer, in_thread
from springtide.config import Config
from springtide.elastic.copies import Domain, preferred, shared
from springtide.elastic.patience import ban_s
from springtide.faults import armed
from springtide.ray.cluster.liveness import answers
from springtide.ray.cluster.nodes import accepting, domains_of, staying
from springtide.ray.cluster.session import NAMESPACE
from springtide.ray.train.mailbox import MailboxClient
from springtide.ray.train.snapshot_lookup import ANSWER_S, contents_of, name_prefix, servers_named
from springtide.ray.train.snapshot_saver import OrphanedRun
from springtide.ray.train.snapshot_server import ASK_THREADS, THREADS, SnapshotServer
from springtide.storage import Folder

ALONE_S = 60.0
"""How long a server stays up without its run's driver [s]."""
_LOOK_S = 5.0
_CANDIDATES = 4
"""To place copies outside the group, servers are started on this many more nodes than copies are needed. The copies go to the
servers that are up first."""
_TRIES = 3
"""Number of attempts to copy one snapshot. After a failure, other peers (nodes that hold copies) are chosen."""
_KEEP_S, _SLOWEST_BYTES_PER_S = 30.0, 20e6
"""Time limit for holding and copying a snapshot: 30 s, plus the time for its size at the slowest speed that is accepted."""
_HOLD_S = 5.0
"""How long this node's server may take to store the state that a rank still has after its group was lost [s]."""
_READ_S = 30.0
"""How long a server may take to send a block [s]."""


class SnapshotClient:
    """A rank's client of its run's snapshot servers; the training loop uses it as its ``SnapshotStore``."""

    def __init__(
        self, config: Config, run: Folder, mailbox: MailboxClient, alone_s: float = ALONE_S, owner: str = ""
    ) -> None:
        """``mailbox``: belongs to the run's driver. ``alone_s``: how long a server stays up without this driver [s]. ``owner``:
        the driver's id; if it is empty, servers commit nothing when the driver is gone."""
        checkpoint, self._mailbox = config.checkpoint, mailbox
        self._prefix = name_prefix(run)
        self._orphaned = OrphanedRun(config, run.url, owner) if owner else None
        self._limit = None if checkpoint.memory_bytes == "auto" else int(checkpoint.memory_bytes)
        self._arguments = (checkpoint.stage, self._limit, alone_s)
        self.node = ray.get_runtime_context().get_node_id()
        self._mine = self._server(self.node)
        self._copies = checkpoint.memory_copies
        self._nodes: dict[str, Domain] = {}
        """Node of the group -> its failure domain."""
        self._peers: dict[str, ActorHandle[SnapshotServer]] = {}
        """Node -> its server, for the nodes that get copies."""
        self._leaving: set[str] = set()
        """Nodes of the group that will be taken away: they get no copies."""
        self._failures: Counter[str] = Counter()
        self._avoided: dict[str, float] = {}
        """Node that failed to hold a copy -> until when it gets none, by ``time.monotonic`` [s]."""
        self._chosen_s = 0.0
        self._asked: dict[str, ObjectRef] = {}
        """Node outside the group -> reference to its server's first answer, which is available once the server is up."""
        self._excluded: set[tuple[str, HeldAt]] = set()
        self._read_at: dict[str, HeldAt] = {}
        self._answering: set[ActorHandle[SnapshotServer]] = set()
        """The servers that answered the last look-up. ``forget`` waits for these, but not for a server on a lost node."""

    def wait(self) -> None:
        """Wait until the server of this node is up."""
        ray.get(self._mine.found.remote())

    def pair(self, nodes: Sequence[str], domains: Sequence[Domain] = ()) -> None:
        """Choose peers (nodes that hold copies of this rank's snapshots) among the nodes of all ranks. Nodes in other failure
        domains come first: see the module ``springtide.elastic.copies``. If there are too few peers, nodes outside the group
        that have room for workers are added once their servers are up. Otherwise the snapshots of a group on one node would be
        lost with that node. ``domains``: failure domain of each rank's node."""
        self._nodes = dict(zip(nodes, domains or [()] * len(nodes), strict=True))
        self._choose()

    def _choose(self) -> None:
        found = self._in_group()
        if len(found) < self._copies:
            found += [node for node in self._beside(accepting(with_room=True), self._copies) if self._stands(node)]
        self._peers = {node: self._server(node) for node in found[: self._copies]}
        self._chosen_s = time.monotonic()

    def _beside(self, nodes: Sequence[str], copies: int) -> list[str]:
        """Return those of ``nodes`` that are outside the group and may hold copies; nodes in other failure domains come first.
        Returns at most ``_CANDIDATES`` nodes more than ``copies``."""
        others = [node for node in nodes if node not in self._nodes and self._may_hold(node)]
        domains = {**domains_of(others), **self._nodes} if others else {}
        others.sort(key=lambda node: shared(domains, self.node, node))
        return others[: _CANDIDATES + copies]

    def _stands(self, node: str) -> bool:
        """Return True if the server of a node is up. Starts it if necessary, but does not wait: a new node may be busy."""
        if node not in self._asked:
            self._asked[node] = self._server(node).found.remote()
        return bool(ray.wait([self._asked[node]], timeout=0)[0])

    def staying(self) -> list[str]:
        """Return the nodes that are not about to be taken away (``SnapshotStore.staying``)."""
        return _told(staying)

    def evacuate(self, stay: Sequence[str]) -> bool:
        """Choose peers (nodes that hold copies) again, among the nodes that ``stay``. Nodes of the group are used if there are
        any; else, if this rank's node leaves, any other node. Returns True if snapshots that are kept from now on outlive the
        leaving nodes."""
        self._leaving = self._nodes.keys() - set(stay)
        found = self._in_group()
        # look outside the group only if none of its nodes can hold copies: this starts snapshot servers, and the group waits
        if not found and self.node not in stay:
            found = self._beside([node for node in _told(accepting) if node in stay], self._copies)
            found.sort(key=lambda node: not self._stands(node))
        found = found[: max(1, self._copies)]
        self._peers = {node: self._server(node) for node in found}
        return bool(found) or self.node in stay

    def _in_group(self) -> list[str]:
        """Return the group's nodes that may hold copies of this node's snapshots, in order of preference."""
        found = preferred(self.node, self._nodes, self._nodes, max(1, self._copies), self._leaving)
        return [node for node in found if self._may_hold(node)]

    def _others(self) -> list[str]:
        """Return the group's other nodes that may hold copies; none if the group is on one node."""
        return [node for node in self._nodes if node != self.node and node not in self._leaving]

    def _may_hold(self, node: str) -> bool:
        return node not in self._leaving and self._avoided.get(node, 0.0) <= time.monotonic()

    def keep(self, snapshot: Snapshot, stage: StagingBuffer, needed_from: int) -> Future[None]:
        """Make the server of this node hold the staging buffer and copy it to the peers. Returns a handle for ``settled``."""
        fd = stage.fd  # copy in a thread of its own: neither a step nor the end of a group waits for a server
        return in_thread("springtide-copies", lambda: self._hold(snapshot, fd, needed_from), daemon=True)

    def hold(self, snapshot: Snapshot, stage: StagingBuffer) -> None:
        """Make the server of this node hold the staging buffer (``SnapshotStore.hold``). Gives up after ``_HOLD_S``, so that
        the next group does not wait."""
        try:
            asked = self._mine.keep.remote(snapshot, snapshot.slot, os.getpid(), stage.fd, [])
            self._answer(asked, time.monotonic() + _HOLD_S)
        except RayError as error:
            raise OSError(str(error).splitlines()[0]) from None

    def _hold(self, snapshot: Snapshot, fd: int, needed_from: int) -> None:
        """Make this node's server hold a snapshot and copy it to the peers; a peer that fails is replaced. Raises OSError if
        that fails or takes too long."""
        until_s = time.monotonic() + _KEEP_S + snapshot.size_bytes / _SLOWEST_BYTES_PER_S
        problem, is_held = "", False
        for _ in range(_TRIES):
            if self._nodes and len(self._peers) < self._copies and time.monotonic() - self._chosen_s > _LOOK_S:
                self._choose()
            peers = dict(self._peers)
            arguments = (snapshot, snapshot.slot, os.getpid(), fd, list(peers.values()), needed_from)
            try:
                problems = self._answer(self._mine.keep.remote(*arguments), until_s)
            except ray.exceptions.RayActorError as error:  # the server may have run out of memory: start another
                problem, self._mine = str(error).splitlines()[0], self._server(self.node)
                continue
            is_held = True
            for node, found in zip(peers, problems, strict=True):
                if found:
                    self._avoid(node)
                    problem = f"node {node[:8]} holds no copy: {found}"
                else:
                    self._failures.pop(node, None)
            if any(problems):
                self._choose()
            if not all(problems):
                return
            if not self._peers:
                break
        if not is_held or (self._copies and self._others()):
            # not an error for a group on one node, which needs no copy elsewhere
            raise OSError(problem or "no other node holds a copy")

    def _answer(self, asked: ObjectRef[Any], until_s: float) -> Any:
        """Return the answer of this node's server. Raises RayActorError if it is gone, OSError if it cannot keep a snapshot or
        does not answer in time."""
        try:
            return ray.get(asked, timeout=max(0.0, until_s - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            raise OSError("the snapshot server of this node does not answer in time") from None
        except RayTaskError as error:
            cause = error.as_instanceof_cause()
            raise OSError(str(getattr(cause, "cause", cause))) from None

    def _avoid(self, node: str) -> None:
        """Place no copies on a node for a while, longer each time."""
        self._failures[node] += 1
        self._avoided[node] = time.monotonic() + ban_s(self._failures[node])

    def settled(self, handle: Future[None]) -> bool:
        """Return True if the server holds the snapshot and a peer has a copy. Raises OSError if that has failed."""
        if not handle.done():
            return False
        try:
            handle.result()
        except RayError as error:
            raise OSError(str(error).splitlines()[0]) from None
        return True

    def forget(self, before: int, kept: SnapshotPart | None = None) -> None:
        """Free old snapshots, as ``SnapshotStore.forget``. A server that does not answer keeps its snapshots until another call
        reaches it."""
        what = None if kept is None else (kept.term, kept.meta.step)
        asked = {server: server.forget.remote(before, what) for server in servers_named(self._prefix)}
        answers = [answer for server, answer in asked.items() if server in self._answering]
        if kept is not None and answers:
            ray.wait(answers, num_returns=len(answers), timeout=ANSWER_S)

    def found(self) -> list[SnapshotPart]:
        """Return the complete snapshot parts on the servers that answer (a part is one rank's share of a snapshot). Each part
        lists all server processes that hold it, those on nodes that stay first. A copy of a part is left out if its worker
        group or its table of tensor pieces differs from the first copy's."""
        stay, contents = staying(), contents_of(servers_named(self._prefix))
        self._answering = {one.server for one in contents}
        contents.sort(key=lambda one: one.where[0] not in stay)
        known: dict[SnapshotKey, SnapshotPart] = {}
        places: dict[SnapshotKey, tuple[HeldAt, ...]] = {}
        for (node, pid), held, _ in contents:
            for part, fd in held:
                first = known.setdefault(part.key, part)
                if (part.group, part.table_digest) == (first.group, first.table_digest):
                    places[part.key] = (*places.get(part.key, ()), HeldAt(node, pid, fd))
        return [dataclasses.replace(part, held_at=places[key]) for key, part in known.items()]

    def source(self, parts: Sequence[SnapshotPart]) -> _Source:
        """Return an object that reads ``parts``, from this node's memory where possible. Raises OSError if no server holds a
        part."""
        self._read_at, origins = {}, {}
        for part in parts:
            file = file_of(part.key)
            places = [place for place in part.held_at if (file, place) not in self._excluded]
            if not places:
                raise OSError(f"the snapshot {file} is gone")
            place = self._read_at[file] = min(places, key=lambda one: one.node != self.node)
            origins[file] = _Origin(part.key, place, place.node == self.node, part.size_bytes)
        return _Source(origins, self._prefix)

    def exclude(self, file: str) -> None:
        """Read ``file`` from another server from now on, because this server's copy is wrong (``SnapshotStore.exclude``)."""
        self._excluded.add((file, self._read_at[file]))

    def _server(self, node: str) -> ActorHandle[SnapshotServer]:
        options = {
            "name": f"{self._prefix}{node}",
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "lifetime": "detached",
            "num_cpus": 0,
            "max_concurrency": ASK_THREADS,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        actor = ray.remote(concurrency_groups=THREADS)(SnapshotServer)
        server = actor.options(**options).remote(*self._arguments)
        server.follow.remote(self._mailbox, armed(), self._orphaned)
        server.limit.remote(self._limit)  # an earlier driver may have set another limit
        return server


def _told(nodes: Callable[[], list[str]]) -> list[str]:
    """Call ``nodes``, a query of Ray's nodes, and return its result. Raises OSError if Ray cannot be reached."""
    try:
        return nodes()
    except RayError as error:
        raise OSError(str(error).splitlines()[0]) from None


class _Origin(NamedTuple):
    """The server process from which one snapshot part is read."""

    key: SnapshotKey
    place: HeldAt
    is_here: bool
    """Whether the snapshot is in memory of this node."""
    size_bytes: int


class _Source:
    """Reads the bytes of snapshots: maps memory of this node, and requests memory of other nodes from their servers."""

    def __init__(self, origins: dict[str, _Origin], prefix: str) -> None:
        """``prefix``: the prefix of the servers' names."""
        self._origins, self._prefix = origins, prefix
        self._maps: dict[str, mmap.mmap] = {}
        self._servers: dict[str, ActorHandle[SnapshotServer]] = {}
        self._lock = threading.Lock()

    def table(self, parts: Sequence[SnapshotPart]) -> PieceTable:
        """Return the table of tensor pieces of ``parts``, as ``SnapshotSource.table``. Sends one request to each server, all at
        the same time."""
        at: dict[str, list[SnapshotPart]] = {}
        for part in parts:
            at.setdefault(self._origins[file_of(part.key)].place.node, []).append(part)
        tables = [PieceTable.of([])]
        try:
            servers = {node: self._server(node) for node in at}
            asked = {
                servers[node].pieces.remote([part.key for part in some]): (servers[node], node)
                for node, some in at.items()
            }
            answers(asked, _READ_S)
            told = [ray.get(one, timeout=0) for one in asked]
        except (RayError, ValueError) as error:
            raise OSError(f"a server with pieces of a snapshot is gone: {error}") from None
        for some, found in zip(at.values(), told, strict=True):
            for part, table in zip(some, found, strict=True):
                if table is None:
                    raise OSError(f"the snapshot {file_of(part.key)} is gone")
                part.check(table)
                tables.append(table)
        return PieceTable.joined(tables)

    def stream(self, name: str, begin: int, end: int) -> Iterator[memoryview]:
        yield self._read(name, begin, end)

    def _read(self, name: str, begin: int, end: int) -> memoryview:
        key, place, is_here, size_bytes = self._origins[name]
        if is_here:
            with self._lock:
                if name not in self._maps:
                    opened = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDONLY)
                    self._maps[name] = mmap.mmap(opened, MARK_BYTES + size_bytes, access=mmap.ACCESS_READ)
                    os.close(opened)
            return memoryview(self._maps[name])[MARK_BYTES + begin : MARK_BYTES + end]
        try:
            asked = (server := self._server(place.node)).read.remote(key, begin, end)
            answers({asked: (server, place.node)}, _READ_S)
            return memoryview(ray.get(asked, timeout=0))
        except (RayError, ValueError) as error:
            raise OSError(f"the snapshot {name} is gone: {error}") from None

    def _server(self, node: str) -> ActorHandle[SnapshotServer]:
        with self._lock:
            if node not in self._servers:
                self._servers[node] = ray.get_actor(f"{self._prefix}{node}", namespace=NAMESPACE)
            return self._servers[node]

    def size(self, name: str) -> int:
        return self._origins[name].size_bytes


@contextlib.contextmanager
def snapshot_servers_follow(run: Folder, mailbox: MailboxClient, orphaned: OrphanedRun | None = None) -> Iterator[None]:
    """Keep the run's snapshot servers up in the block, also those that an earlier driver started, and end them with the block.
    After an error they stay up, so that a driver that resumes within a minute finds them. ``orphaned``: see
    ``SnapshotServer.follow``."""
    for server in servers_named(name_prefix(run)):
        server.follow.remote(mailbox, armed(), orphaned)
    yield
    for server in servers_named(name_prefix(run)):
        ray.kill(server)
