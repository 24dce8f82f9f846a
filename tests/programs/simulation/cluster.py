"""Nodes that come and go, the notices of that, the worker processes on them, and the snapshots in their memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError, RaySystemError

from simulation.clock import BEGIN_S, Clock, Process
from springtide.checkpoint.commit import CommitJob, Committed
from springtide.checkpoint.piece_table import PieceTable
from springtide.checkpoint.snapshot_commit import write_part
from springtide.checkpoint.snapshot_parts import Snapshot, SnapshotPart, file_of
from springtide.elastic.policy import Node
from springtide.ray.train.snapshot_lookup import ServerContents

_HELD = 2
"""Snapshots of a rank that a server holds."""


@dataclasses.dataclass
class Machine:
    """A node."""

    id: str
    leaves_at_s: float | None = None
    alive: bool = True
    died_s: float = 0.0
    lies: bool = False
    """Whether it reads other bytes than are stored."""
    frozen_until_s: float = 0.0
    workers: list[Any] = dataclasses.field(default_factory=list)
    """The workers' processes that were started on it."""
    last_frozen_s: float = -1e9
    snapshots: dict[tuple[int, int, int], tuple[Snapshot, bytes]] = dataclasses.field(default_factory=dict)

    @property
    def worker_frozen_until_s(self) -> float:
        """Until when the process of one of its workers is stopped, or the node."""
        return max([self.frozen_until_s, *(one.frozen_until_s for one in self.workers if one.alive)])

    def hold(self, snapshot: Snapshot, data: bytes) -> None:
        """Keep a part, and the one before it of the same rank."""
        self.snapshots[snapshot.key] = (snapshot, data)
        same = sorted(key for key in self.snapshots if key[0] == snapshot.term and key[2] == snapshot.rank)
        for key in same[:-_HELD]:
            del self.snapshots[key]


class Cluster:
    """What Ray knows, and a little later than it happens."""

    def __init__(self, clock: Clock, nodes: int) -> None:
        self.clock = clock
        self.copies_s = 0.1, 1.0
        """Least and most time to copy a snapshot to another node [s]."""
        self.crashes_until_s = -1e9
        """Workers that start until then end by themselves."""
        self.machines: dict[str, Machine] = {}
        self.head_away_until_s = 0.0
        self.head_refuses = False
        """Whether a request to Ray's head fails at once."""
        self.look_cpu_s = 0.0
        """Processor time that Ray's table of the nodes takes [s]."""
        self.changed: list[Callable[[], None]] = []
        self.committed: Callable[[int], None] = lambda step: None
        """Called when the holders of a snapshot have committed its step."""
        self.traps: dict[str, Callable[[str], None]] = {}
        """What is done with the first node that comes to a phase."""
        self._number = 0
        for _ in range(nodes):
            self.join()

    def join(self) -> Machine:
        """A node joins."""
        self._number += 1
        name = f"node{self._number:02d}"
        machine = self.machines[name] = Machine(name)
        return machine

    @property
    def alive(self) -> list[Machine]:
        return [one for one in self.machines.values() if one.alive]

    def kill(self, name: str) -> None:
        """A node is gone, with its processes and its memory."""
        machine = self.machines[name]
        if not machine.alive:
            return
        machine.alive, machine.died_s = False, self.clock.now
        machine.snapshots.clear()
        for process in self.clock.processes:
            if process.host == name:
                process.kill()

    def notice(self, name: str, left_s: float) -> None:
        """A node is told that it will go, and goes. ``left_s``: infinite if nobody knows when."""
        machine = self.machines[name]
        if machine.alive and machine.leaves_at_s is None:
            machine.leaves_at_s = self.clock.now + left_s
            if left_s < math.inf:
                self.clock.after(left_s, functools.partial(self.kill, name))

    def reach(self, phase: str, name: str) -> None:
        """A worker of a node comes to a phase."""
        if (trap := self.traps.pop(phase, None)) is not None:
            trap(name)

    def freeze(self, name: str, seconds: float, worker_only: bool = False) -> None:
        """SIGSTOP of all processes of a node, or of its worker's alone, and SIGCONT later."""
        machine, until_s = self.machines[name], self.clock.now + seconds
        for actor in machine.workers:
            actor.frozen_until_s = max(actor.frozen_until_s, until_s)
        if not worker_only:
            machine.frozen_until_s = max(machine.frozen_until_s, until_s)
        machine.last_frozen_s = until_s
        for process in self.clock.processes:
            if process.host == name and process.alive and (process.rank or not worker_only):
                process.freeze(until_s)

    def silent(self, actors: Mapping[Any, str]) -> set[Any]:
        """As ``liveness.silent_processes``, which waits for an answer for a second."""
        now = self.clock.now
        found = {one for one in actors if self._is_silent(one, now)}
        if found:
            self.clock.sleep(1.0)
        return found

    def _is_silent(self, actor: Any, now: float) -> bool:
        machine = self.machines[actor.node]
        until_s = machine.frozen_until_s if isinstance(actor, SnapshotServer) else actor.frozen_until_s
        return machine.alive and until_s > now

    def ask_head(self) -> None:
        """A request to Ray's head: it waits while the head is away."""
        if self.head_refuses:
            raise RaySystemError("the head is away")
        while self.clock.current is not None and self.head_away_until_s > self.clock.now:
            self.clock.sleep(self.head_away_until_s - self.clock.now + 0.1)

    def draining(self) -> dict[str, int]:
        """Node -> when it goes, since 1970 [ms]; 0 if nobody knows. As Ray's."""
        return {
            one.id: round((BEGIN_S + one.leaves_at_s) * 1000) if one.leaves_at_s < math.inf else 0
            for one in self.alive
            if one.leaves_at_s is not None
        }

    def observed(self) -> list[Node]:
        """The nodes that Ray thinks alive: a dead one for three seconds more."""
        self.ask_head()
        self.clock.cpu_s += self.look_cpu_s
        now = self.clock.now
        return [
            Node(one.id, 1, one.leaves_at_s) for one in self.machines.values() if one.alive or now - one.died_s < 3.0
        ]

    def unanswering(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if not self.machines[name].alive}

    def unspeaking(self, names: Iterable[str], speaks: bool) -> set[str]:
        """Those that are lost or stopped."""
        now = self.clock.now
        return {name for name in names if not self.machines[name].alive or self.machines[name].frozen_until_s > now}

    def contents(self, servers: object) -> list[ServerContents]:
        """What the snapshot servers hold."""
        self.clock.sleep(0.1)
        now = self.clock.now
        return [
            ServerContents(
                (one.id, 1), [(held.part, 0) for held, _ in one.snapshots.values()], SnapshotServer(self, one)
            )
            for one in self.alive
            if one.frozen_until_s <= now
        ]

    def end_servers(self) -> None:
        """The snapshot servers end, with what they hold."""
        for machine in self.alive:
            machine.snapshots.clear()

    def staying(self) -> list[str]:
        return [one.id for one in self.alive if one.leaves_at_s is None]


class SnapshotServer:
    """The server of a node, as its driver calls it."""

    def __init__(self, cluster: Cluster, machine: Machine) -> None:
        self.node = machine.id
        self.save = types.SimpleNamespace(remote=functools.partial(self._save, cluster, machine))

    @staticmethod
    def _save(cluster: Cluster, machine: Machine, job: CommitJob, key: tuple[int, int, int], tries: int) -> Saving:
        def work() -> Any:
            if key not in machine.snapshots:
                return OSError("the snapshot is gone")
            snapshot, data = machine.snapshots[key]
            result = write_part(job, snapshot, memoryview(data), tries)
            if job.rank == 0 and isinstance(result, Committed):
                cluster.committed(job.meta.step)
            return result

        return Saving(cluster.clock, cluster.clock.start("server", machine.id, work))


class Saving:
    """Ray's reference to what ``SnapshotServer.save`` returns."""

    def __init__(self, clock: Clock, process: Process) -> None:
        self._clock, self._process = clock, process

    @property
    def is_there(self) -> bool:
        return not self._process.alive

    def get(self, timeout_s: float | None = None) -> Any:
        while self._process.alive:
            self._clock.sleep(0.1)
        if self._process.error is not None:
            raise self._process.error
        if not self._process.greenlet.dead:
            raise RayActorError(error_msg="The actor died unexpectedly")
        return self._process.result


class Snapshots:
    """The ``SnapshotStore`` of one rank."""

    def __init__(self, cluster: Cluster, nodes: Sequence[str], rank: int) -> None:
        self.cluster, self.nodes, self.rank = cluster, list(nodes), rank
        self.node = nodes[rank]
        self._copies: list[Process] = []
        self._stay: list[str] | None = None

    def take(self, snapshot: Snapshot, data: bytes) -> None:
        """Hold a part on this node, and copy it to the next one."""
        clock = self.cluster.clock
        self.cluster.machines[self.node].hold(snapshot, data)
        ring = [*self.nodes[self.rank + 1 :], *self.nodes[: self.rank]]
        if self._stay is not None:
            ring = [name for name in ring if name in self._stay] or [one for one in self._stay if one != self.node]
        peers = [name for name in ring if name != self.node]
        if peers:
            copy = functools.partial(self._copy, peers[0], snapshot, data)
            self._copies.append(clock.start("copy", self.node, copy))

    def _copy(self, peer: str, snapshot: Snapshot, data: bytes) -> None:
        self.cluster.clock.sleep(self.cluster.clock.random.uniform(*self.cluster.copies_s))
        if self.cluster.machines[peer].alive:
            self.cluster.machines[peer].hold(snapshot, data)

    @property
    def busy(self) -> bool:
        self._copies = [one for one in self._copies if one.alive]
        return bool(self._copies)

    def hold(self, snapshot: Snapshot, stage: Any) -> None:
        raise NotImplementedError("no model lives here")

    def staying(self) -> list[str]:
        return self.cluster.staying()

    def evacuate(self, stay: Sequence[str]) -> bool:
        self._stay = list(stay)
        return bool(self._stay)

    def found(self) -> list[SnapshotPart]:
        self.cluster.clock.sleep(0.1)
        known = {key: one.part for machine in self.cluster.alive for key, (one, _) in machine.snapshots.items()}
        return list(known.values())

    def source(self, parts: Sequence[SnapshotPart]) -> _Source:
        return _Source(self.cluster, {file_of(one.key): one.key for one in parts})

    def exclude(self, file: str) -> None:
        raise NotImplementedError("memory does not change here")

    def forget(self, before: int, kept: SnapshotPart | None = None) -> None:
        for machine in self.cluster.alive:
            for key in list(machine.snapshots):
                if key[0] < before and (kept is None or key[:2] != kept.key[:2]):
                    del machine.snapshots[key]

    def keep(self, snapshot: Snapshot, stage: Any, needed_from: int) -> Any:
        raise NotImplementedError("ranks call ``take``")

    def settled(self, handle: Any) -> bool:
        raise NotImplementedError("ranks look at ``busy``")


class _Source:
    def __init__(self, cluster: Cluster, keys: dict[str, tuple[int, int, int]]) -> None:
        self._cluster, self._keys = cluster, keys

    def _held(self, name: str) -> tuple[Snapshot, bytes]:
        for machine in self._cluster.alive:
            if self._keys[name] in machine.snapshots:
                return machine.snapshots[self._keys[name]]
        raise OSError(f"the snapshot {name} is gone")

    def table(self, parts: Sequence[SnapshotPart]) -> PieceTable:
        self._cluster.clock.sleep(0.02)
        tables = [PieceTable.of([])]
        for part in parts:
            tables.append(self._held(file_of(part.key))[0].table)
            part.check(tables[-1])
        return PieceTable.joined(tables)

    def stream(self, name: str, begin: int, end: int) -> Iterator[memoryview]:
        self._cluster.clock.sleep(0.02)
        yield memoryview(self._held(name)[1])[begin:end]

    def size(self, name: str) -> int:
        return len(self._held(name)[1])
