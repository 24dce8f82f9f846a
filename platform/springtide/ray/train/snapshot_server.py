"""The snapshot server of a node: one small actor that holds snapshots (copies of the training state) in shared memory. They
survive the ranks that have written them.

    rank --keep(pid, fd)--> server of its node: opens the memory itself --replicate--> servers of other nodes
    after a loss: rank 0 asks every server which parts it has (a part is one rank's share of a snapshot), and chooses the
        newest step whose parts are all there. Only the parts of this step, and their tables of tensor pieces, are read

Calls that wait for another server have threads of their own: two servers whose threads all wait for each other would deadlock.
A call from one server to another (``replicate``) waits for nothing.

A server belongs to one run (its name has the digest of the run's URL), outlives worker groups, and ends itself when the run's
driver has been gone for a minute. Its memory has no file name, and is freed when the server ends. Before they end, the servers
commit their snapshots (``snapshot_saver.OrphanedRun``).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from springtide.checkpoint.commit import CommitJob, Committed
from springtide.checkpoint.piece_table import PieceTable
from springtide.checkpoint.shared_memory import MARK_BYTES, NO_STEP, mark
from springtide.checkpoint.snapshot_commit import write_part
from springtide.checkpoint.snapshot_parts import Snapshot, SnapshotKey, SnapshotPart, file_of
from springtide.faults import arm, fault_point
from springtide.ray.train.mailbox import MailboxClient
from springtide.ray.train.snapshot_lookup import ANSWER_S
from springtide.storage.host_limits import free_bytes

if TYPE_CHECKING:  # avoids a circular import
    from springtide.ray.train.snapshot_saver import OrphanedRun

THREADS = {"keep": 16, "copy": 16}
"""Number of threads of each of Ray's concurrency groups. ``keep``: calls that wait for other servers. ``copy``: calls that move
bytes."""
ASK_THREADS = 4
"""Threads for all other calls, which are answered at once."""
_CHUNK_BYTES = 32 * 2**20
_COPY_S = 10.0
"""How long another server may take to store a chunk [s]."""
_LOOK_S = 5.0

Place = tuple[int, int, bool, int]
"""Key under which a snapshot is held: its lease's number (term), its rank, whether it is a copy from another node, and the
index of the rank's staging buffer."""


class _Segment:
    """The mapped shared memory of one snapshot of a rank."""

    def __init__(self, fd: int, snapshot: Snapshot, writable: bool) -> None:
        self.fd, self.snapshot = fd, snapshot
        self.map = mmap.mmap(
            fd, MARK_BYTES + snapshot.size_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        )

    def mark(self, found: bytes) -> None:
        """Write the mark at the start of the memory. It names the step and worker group of the bytes there
        (``StagingBuffer.mark``)."""
        self.map[: len(found)] = found

    @property
    def size_bytes(self) -> int:
        return len(self.map)

    @property
    def is_whole(self) -> bool:
        """Whether the memory holds all of ``snapshot``. False if the rank died while it copied its next snapshot into the same
        memory."""
        return self.map[: len(self.snapshot.mark)] == self.snapshot.mark

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a reader still has a view; the memory is freed with the last view
            self.map.close()
        os.close(self.fd)


class SnapshotServer:
    """The actor that holds one run's snapshots in the memory of one node."""

    def __init__(self, folder: str, limit_bytes: int | None, alone_s: float) -> None:
        """``limit_bytes``: most memory for snapshots; None is half of the memory that the node has free now. ``alone_s``: how
        long this server stays up without the run's driver [s]."""
        self._held: dict[Place, _Segment] = {}
        self._promised: dict[Place, int] = {}
        """Size of each snapshot whose memory is being opened or allocated now; it counts as used [bytes]."""
        self._folder, self._is_chosen = folder, limit_bytes is not None
        self._limit = free_bytes() // 2 if limit_bytes is None else limit_bytes
        self._lock = threading.Lock()
        self._mailbox: MailboxClient | None = None
        self._orphaned: OrphanedRun | None = None
        self._called_s = time.monotonic()
        """Time of the last call that stored something here, by a rank or by another server."""
        threading.Thread(target=self._end_alone, args=(alone_s,), daemon=True).start()

    def follow(self, mailbox: MailboxClient, fault_points: str = "", orphaned: OrphanedRun | None = None) -> None:
        """Stay up as long as the run of ``mailbox`` has a driver. ``fault_points``: address of a test that injects faults,
        empty without one. ``orphaned``: commits the snapshots held here once the driver is gone; with None, nothing is
        committed."""
        self._mailbox, self._orphaned = mailbox, orphaned
        arm(fault_points)

    def limit(self, limit_bytes: int | None) -> None:
        """Set the memory limit to ``limit_bytes``, or with None to half of the free memory. An earlier driver may have started
        this server with another limit. If ``limit_bytes`` was None before and is None again, the computed limit stays."""
        with self._lock:
            if limit_bytes is not None:
                self._limit = limit_bytes
            elif self._is_chosen:  # count the memory of held snapshots as free
                self._limit = (free_bytes() + sum(held.size_bytes for held in self._held.values())) // 2
            self._is_chosen = limit_bytes is not None

    @ray.method(concurrency_group="keep")
    def keep(
        self,
        snapshot: Snapshot,
        slot: int,
        pid: int,
        fd: int,
        peers: Sequence[ActorHandle[SnapshotServer]],
        needed_from: int = 0,
    ) -> list[str]:
        """Hold the memory that process ``pid`` has open as ``fd``, and copy it to ``peers``. First free the snapshots that are
        no longer needed: those of leases with a number (term) below ``needed_from``. Returns for each peer why it has no
        complete copy; empty if it has one. Raises OSError if the memory limit would be exceeded."""
        self._called_s = time.monotonic()
        place, path = (snapshot.term, snapshot.rank, False, slot), f"/proc/{pid}/fd/{fd}"
        self.forget(needed_from)
        held = self._held.get(place)
        if held is None or os.stat(path).st_ino != os.fstat(held.fd).st_ino:
            with self._room(place, snapshot):
                # do not block: the rank may have closed ``fd``, and the number may now be that of a pipe
                opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                held = self._put(place, _Segment(opened, snapshot, writable=False))
        held.snapshot = snapshot
        problems = [""] * len(peers)
        if peers:
            fault_point("replicate", "before")
        with memoryview(held.map) as whole:
            for begin in range(MARK_BYTES, len(whole), _CHUNK_BYTES) if snapshot.size_bytes else [MARK_BYTES]:
                to = {number: peer for number, peer in enumerate(peers) if not problems[number]}
                if not to:
                    break
                part = np.frombuffer(whole[begin : begin + _CHUNK_BYTES], dtype=np.uint8)
                last, sent = begin + part.nbytes == len(whole), ray.put(part)
                copies = {
                    peer.replicate.remote(snapshot, slot, begin, sent, last, needed_from): number
                    for number, peer in to.items()
                }
                done, _ = ray.wait(list(copies), num_returns=len(copies), timeout=_COPY_S)
                for copy, number in copies.items():
                    problems[number] = _problem(copy) if copy in done else f"no answer within {_COPY_S:g} s"
        if peers:
            fault_point("replicate", "after")
        return problems

    @ray.method(concurrency_group="copy")
    def replicate(
        self, snapshot: Snapshot, slot: int, begin: int, part: np.ndarray, is_last: bool, needed_from: int = 0
    ) -> None:
        """Store a chunk of a peer's snapshot, which begins at byte ``begin`` of its memory. First free the snapshots of leases
        with a number (term) below ``needed_from``. Raises OSError if the memory limit would be exceeded, or if the chunk comes
        too late: a newer snapshot has taken the memory."""
        self._called_s = time.monotonic()
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
        is_newer = held.snapshot.meta.step > snapshot.meta.step
        if is_newer or (begin > MARK_BYTES and held.snapshot.mark != snapshot.mark):
            raise OSError(f"the memory for step {snapshot.meta.step} holds step {held.snapshot.meta.step} by now")
        if begin == MARK_BYTES:
            held.mark(mark(NO_STEP))
            held.snapshot = snapshot
        held.map[begin : begin + part.nbytes] = part.data
        if is_last:
            held.mark(snapshot.mark)

    def forget(self, before: int, kept: tuple[int, int] | None = None) -> None:
        """Free the snapshots of leases with a number (term) below ``before``, except the snapshot with term and step
        ``kept``."""
        with self._lock:
            for place, held in list(self._held.items()):
                if held.snapshot.term < before and (held.snapshot.term, held.snapshot.meta.step) != kept:
                    self._held.pop(place).close()

    def found(self) -> tuple[tuple[str, int], list[tuple[SnapshotPart, int]]]:
        """Return this server's node and process id, and the complete snapshot parts held here, each with its file descriptor.
        Processes of this node open the memory themselves by process id and descriptor."""
        with self._lock:
            whole = [(held.snapshot.part, held.fd) for held in self._held.values() if held.is_whole]
        return (ray.get_runtime_context().get_node_id(), os.getpid()), whole

    def pieces(self, keys: Sequence[SnapshotKey]) -> list[PieceTable | None]:
        """Return the table of tensor pieces of each of these snapshot parts; None for a part that this server does not hold
        completely."""
        with self._lock:
            found = {held.snapshot.key: held.snapshot.table for held in self._held.values() if held.is_whole}
        return [found.get(key) for key in keys]

    @ray.method(concurrency_group="copy")
    def read(self, key: SnapshotKey, begin: int, end: int) -> np.ndarray:
        """Return bytes ``begin`` to ``end`` of a snapshot part, for a process on another node."""
        with self._lock:
            [held, *_] = [held for held in self._held.values() if held.snapshot.key == key and held.is_whole]
        return np.frombuffer(held.map[MARK_BYTES + begin : MARK_BYTES + end], dtype=np.uint8)

    @ray.method(concurrency_group="keep")
    def save(self, job: CommitJob, key: SnapshotKey, tries: int) -> Committed | BaseException:
        """Write a snapshot part that this server holds to the checkpoint store, with ``write_part``. Returns an error instead
        of raising it."""
        with self._lock:
            held = next((held for held in self._held.values() if held.snapshot.key == key and held.is_whole), None)
            if held is None:
                return OSError(f"the snapshot {file_of(key)} is gone")
            part = memoryview(held.map)[MARK_BYTES:]
        return write_part(job, held.snapshot, part, tries)

    def _put(self, place: Place, held: _Segment) -> _Segment:
        with self._lock:
            before, self._held[place] = self._held.get(place), held
        if before is not None:
            before.close()
        return held

    @contextlib.contextmanager
    def _room(self, place: Place, snapshot: Snapshot) -> Iterator[None]:
        """Reserve room for a snapshot while its memory is opened or allocated under the key ``place``, so that concurrent calls
        do not use the same room. Raises OSError if the memory limit would be exceeded."""
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
        """End this process after ``alone_s`` [s] in which the run's driver was gone or trained another run, and no rank or
        other server stored anything here. Before that, commit the snapshots that the run's servers hold."""
        is_alone = True
        while is_alone:
            seen = time.monotonic()
            while time.monotonic() - max(seen, self._called_s) < alone_s:  # a group may still call without its driver
                time.sleep(min(_LOOK_S, alone_s / 4))  # between polls
                if self._has_driver():
                    seen = time.monotonic()
            with contextlib.suppress(Exception):  # ignore errors: this process ends in any case
                if self._orphaned is not None:
                    self._orphaned.commit(self.found()[0], self._has_driver)
            is_alone = self._has_driver()
        os._exit(0)

    def _has_driver(self) -> bool:
        """Return True if the run's driver is alive and trains this run."""
        with contextlib.suppress(Exception):  # the mailbox is gone, or the cluster itself is ending
            return self._mailbox is not None and self._mailbox.progress().get(ANSWER_S) is not None
        return False


def _problem(copy: ObjectRef[None]) -> str:
    """Return why a completed call to another server has failed; empty if it succeeded."""
    try:
        ray.get(copy)
    except ray.exceptions.RayError as error:  # the other server is lost, or has no room
        return str(getattr(error, "cause", None) or error).strip().splitlines()[-1][:200]
    return ""
