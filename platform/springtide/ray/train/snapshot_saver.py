"""Commit the newest snapshot as a checkpoint while no group trains. The snapshot servers (one per node) write it; this file is
the driver's side.

    no group will train soon --begin--> a thread: find the snapshot -> claim a lease -> servers write their parts -> Saved
    a group starts ------------cancel--> no more leases are claimed; the group's newer lease ends a save that still runs
    the run is asked to stop --finish--> wait for the save

While no group trains, the newest state is only in the memory of nodes. These nodes may leave, or end with the run. If the
driver itself is gone, for example killed, the servers commit this state before they end. One of them then does the driver's
work (``OrphanedRun``).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.commit import Committed
from springtide.checkpoint.format import BadFile
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.snapshot_commit import PARTS_S, jobs_for, to_commit
from springtide.checkpoint.snapshot_parts import SnapshotKey, file_of
from springtide.elastic.patience import store_pause_s
from springtide.errors import RunExists
from springtide.events import Saved
from springtide.ray.cluster.liveness import QUIET_S, Liveness
from springtide.ray.cluster.nodes import staying
from springtide.ray.train.snapshot_lookup import contents_of, name_prefix, num_unheard, servers_named
from springtide.storage import Folder

if TYPE_CHECKING:  # not at run time: servers import this file, and must not load torch
    from springtide.config import Config
    from springtide.ray.train.job import TrainJob

_LOOK_S = 0.2
_WRITE_S = PARTS_S + 60.0
"""How long the servers may take to write the snapshot parts that they hold [s]."""
_ORPHANED_S = PARTS_S
"""How long servers without a driver try to commit their snapshots [s]."""
_EACH_S = 0.05
"""Pause between two look-ups of a server whose driver is gone, for each server of the run [s]. The pause grows with their
number, because each look-up queries all of them."""
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class OrphanedRun:
    """What the snapshot servers need to commit a run whose driver and groups are gone. Picklable."""

    config: Config
    url: str
    """URL of the run's folder."""
    owner: str
    """Id of the last driver that trained the run. Nothing is written if another driver has claimed the run since then, unless
    that driver has ended without a worker group."""
    keeps_snapshots: bool = True

    @property
    def folder(self) -> Folder:
        """The run's folder."""
        return Folder(self.url)

    def commit(self, here: tuple[str, int], is_over: Callable[[], bool]) -> None:
        """Commit the newest complete snapshot that the run's servers hold, after the run has lost its driver.

        Each server calls this. The server with the lowest node and process id claims a lease (the right to write the run) and
        commits. A new driver may take over this lease at once. The other servers stay up until the checkpoint exists, because
        they hold parts of it.

        Args:
            here: node and process of this server, as ``SnapshotServer.found`` returns them.
            is_over: returns True once the run has a driver again.
        """
        saver, failures, pause_s, end_s = SnapshotSaver(self), 0, 0.0, time.monotonic() + _ORPHANED_S
        while not is_over() and time.monotonic() < end_s:
            try:
                servers = list(servers_named(name_prefix(self.folder)))
                pause_s = len(servers) * _EACH_S
                places = contents_of(servers)
                held = [part for place in places for part, _ in place.held]
                last = leases.newest(self.folder)
                if last is None or not (last.owner == self.owner or leases.is_left(self.folder, last)):
                    return
                lacking = to_commit(self.folder, held, configs.fingerprint(self.config))
                if not lacking and not num_unheard(servers, places):
                    # nothing is left to commit, and no silent server can hold missing parts of a newer snapshot
                    return
                if lacking and here == min(place.where for place in places):
                    saver.save_newest()
                    failures = 0
                    continue
            except Exception as error:  # the store may be down, or another server may have claimed the lease
                failures += 1
                _log.warning("the newest snapshot of an orphaned run is not committed yet: %s", error)
            time.sleep(max(store_pause_s(max(1, failures)), pause_s))  # between look-ups


class SnapshotSaver:
    """Commits the newest snapshot of a run between two groups."""

    def __init__(self, job: TrainJob | OrphanedRun) -> None:
        self._job = job
        self._lock = threading.Lock()
        """Locked while a lease is claimed, so that ``cancel`` waits for the claim. A group that starts after ``cancel`` must
        get a newer lease."""
        self._thread: threading.Thread | None = None
        self._attempt = 0
        """Number of the newest save. It is also increased when a group starts: a save with a lower number may then neither
        claim a lease nor record its result."""
        self._safe, self._problem = not job.keeps_snapshots, ""
        self._not_before_s, self._failures = float("-inf"), 0
        self._silent = 0
        """Number of servers that did not answer the last look-up, and may hold the rest of a newer snapshot."""
        self._excluded: set[tuple[tuple[str, int], SnapshotKey]] = set()
        """Server and snapshot key of each corrupt copy: its bytes differ from those that the rank copied."""
        self.refused: RunExists | None = None
        """The error if another driver has claimed the run; else None. If it is set, this driver may neither save nor train any
        more."""

    def begin(self) -> None:
        """Save the newest snapshot in the background if the store lacks it. Does nothing if a save is under way, or has failed
        a moment ago."""
        if self._safe or self._is_busy or time.monotonic() < self._not_before_s:
            return
        self._problem, self._attempt = "", self._attempt + 1
        given = (self._attempt,)
        self._thread = threading.Thread(target=self._work, args=given, name="springtide-snapshot-saver", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Stop saving from memory, because a worker group that restores from memory is about to start: claim no more leases."""
        with self._lock:
            self._thread, self._attempt, self._problem = None, self._attempt + 1, ""
            self._safe, self._failures, self._not_before_s = not self._job.keeps_snapshots, 0, float("-inf")

    def finish(self, is_over: Callable[[], bool]) -> str:
        """Save the newest snapshot if the store lacks it. Wait until the save has ended, or ``is_over`` returns True. Returns
        why the save has failed; empty if it has not."""
        if not self._is_busy:
            self._not_before_s = float("-inf")
            self.begin()
        while self._is_busy and not is_over():
            time.sleep(_LOOK_S)  # between polls
        return self._problem

    @property
    def is_safe(self) -> bool:
        """Whether the store is known to have the newest state."""
        return self._safe

    @property
    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _work(self, attempt: int) -> None:
        try:
            saved = self.save_newest(attempt)
            if saved is not None and not isinstance(self._job, OrphanedRun):
                self._job.mailbox.post([saved])
            if self._silent:
                raise OSError(f"{self._silent} snapshot servers do not answer, and may hold a newer state")
            with self._lock:
                self._safe = self._safe or attempt == self._attempt
        except Exception as error:  # on any error the state is in memory only
            with self._lock:
                if attempt != self._attempt:
                    return
                self._failures += 1
                self._not_before_s = time.monotonic() + store_pause_s(self._failures)
                # RunExists is no problem to report: the driver that has claimed the run has the state
                self._problem = "" if isinstance(error, RunExists) else str(error)
            _log.warning("the newest snapshot could not be committed, and is tried again: %s", error)

    def save_newest(self, attempt: int = 0) -> Saved | None:
        """Commit the newest snapshot. If a copy in memory is corrupt, use other copies as long as there are any. Returns None
        in three cases: the store has that step already; no whole snapshot is left; a group has started since save number
        ``attempt`` began."""
        while True:
            excluded = len(self._excluded)
            try:
                return self._save(attempt)
            except BadFile as error:
                if len(self._excluded) == excluded:
                    raise
                _log.warning("a snapshot in memory is corrupt; trying another copy: %s", error)

    def _save(self, attempt: int) -> Saved | None:
        """Try ``save_newest`` once; raises BadFile if a copy is corrupt."""
        begin_s, job, run, config = time.monotonic(), self._job, self._job.folder, self._job.config
        servers = list(servers_named(name_prefix(run)))
        places, stay = contents_of(servers), set(staying())
        self._silent = num_unheard(servers, places)
        places.sort(key=lambda place: place.where[0] not in stay)  # prefer copies on nodes that stay
        held = [
            (part, place) for place in places for part, _ in place.held if (place.where, part.key) not in self._excluded
        ]
        holders = {part.key: place for part, place in reversed(held)}
        parts = to_commit(run, [part for part, _ in held], configs.fingerprint(config))
        if not parts:
            return None
        with self._lock:
            if attempt != self._attempt:
                return None
            is_orphaned = isinstance(job, OrphanedRun)
            try:
                term = leases.claim(run, job.owner, trains=False, again=True, yields=is_orphaned).term
            except RunExists as error:
                last = leases.newest(run)
                # no refusal if this driver's own servers have claimed the lease
                self.refused = error if last and last.owner != job.owner else None
                raise
        shown, checkpoint = configs.redact(config).model_dump(mode="json"), config.checkpoint
        jobs = jobs_for(run, term, parts, shown, Rule.of(checkpoint))
        try:
            tasks = zip(parts, jobs, strict=True)
            asked = {
                holders[part.key].server.save.remote(one, part.key, checkpoint.tries): holders[part.key].server
                for part, one in tasks
            }
            outcomes = _outcomes(asked)
        except BadFile as error:
            for part in parts:
                if error.file == file_of(part.key):  # the next try takes the part from another node
                    self._excluded.add((holders[part.key].where, part.key))
            raise
        finally:
            leases.end(run, term)
        size, written = outcomes[0].size_bytes, outcomes[0].written_bytes
        took_s = time.monotonic() - begin_s
        return Saved(
            step=parts[0].meta.step, name=outcomes[0].name, size_bytes=size, written_bytes=written, save_time_s=took_s
        )


def _outcomes(asked: Mapping[ObjectRef[Any], ActorHandle]) -> list[Committed]:
    """Return what the servers that hold the parts have written. If a server returns an error, raise it at once: the server with
    rank 0's part would wait in vain for the other parts. Raises OSError if a server does not answer in time, or is gone.

    Args:
        asked: the pending result of each write -> the server that writes.
    """
    waiting, end_s, liveness = list(asked), time.monotonic() + _WRITE_S, Liveness()
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, min(QUIET_S, end_s - time.monotonic())))
        if not done and time.monotonic() >= end_s:
            raise OSError(f"{len(waiting)} snapshot servers did not write their parts within {_WRITE_S:g} s")
        if not done and liveness.gone({asked[one]: "" for one in waiting}):
            raise OSError("a snapshot server that must write its part does not answer: its process or host is stopped")
        for outcome in ray.get(done):
            if not isinstance(outcome, Committed):
                raise outcome
    found: list[Committed] = ray.get(list(asked))
    return found
