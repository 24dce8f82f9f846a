"""What a driver keeps from one run to the next: its share of a worker pool, its worker processes and their mailbox. Each of
these takes a second or more to start."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Protocol

import ray
from ray.exceptions import RayError

from springtide.config import Config
from springtide.elastic import GroupRequest
from springtide.elastic.allocation import WorkerShare
from springtide.errors import RunExists
from springtide.events import Event
from springtide.ray.cluster.worker_queue import QueueClient
from springtide.ray.names import name_of, owner_of
from springtide.ray.train.mailbox import MailboxClient, WorkerLimit, open_mailbox
from springtide.ray.train.process_pool import WorkerProcessPool

_NEXT_S = 10.0
"""How long the worker processes of an ended trial stay up for the next trial [s]."""


class ClusterShare(Protocol):
    """A driver's client of a service that shares workers among several runs: ``WorkerPoolClient`` or ``QueueClient``."""

    def claim(self, config: Config) -> None:
        """Request workers for a run."""

    def release(self) -> None:
        """Withdraw the request."""

    def mine(self, timeout_s: float, holds: Mapping[str, int], most: int) -> WorkerShare:
        """Return the workers that the run may use. ``holds``: the workers that the run has on each node. ``most``: the most
        workers that the run can use now, 0 while it is paused. Raises RayError if there is no answer in time."""

    def closed(self) -> bool:
        """Return True if the run must not continue."""


class WorkerLender:
    """The workers and the mailbox that one driver lends to its runs."""

    def __init__(self, share: ClusterShare | None = None, is_trial: bool = False, is_alone: bool = False) -> None:
        """``share``: the driver's client of a sweep's worker pool or of the cluster's queue, through which it shares workers
        with other drivers; None without one. ``is_alone``: the cluster was started for this driver."""
        self.share, self._is_trial, self.is_alone = share, is_trial, is_alone
        self.processes = WorkerProcessPool()
        self._mailbox: MailboxClient | None = None
        self._limit = WorkerLimit()
        self._waits: threading.Timer | None = None
        self._lock = threading.Lock()

    def open_mailbox(self, config: Config) -> MailboxClient:
        """Open the mailbox of a new run. Raises RunExists if another driver of this cluster trains the run."""
        owner = owner_of(config, self._is_trial)
        self.processes.owner = owner
        # a fixed name keeps a second driver from training the run; trials need none, because their sweep has a lease
        name = name_of(owner, "mailbox") if self._is_trial else f"{owner}/mailbox"
        try:
            self._mailbox = open_mailbox(name, config.num_steps, float(config.elastic.hang), self._mailbox)
        except ValueError:
            raise RunExists(
                f"run {config.run.id!r} is being trained on this cluster by another driver; wait for it or stop it"
            ) from None
        if self._limit != WorkerLimit():
            self._mailbox.limit_workers(self._limit).wait()  # wait: the controller must start with this limit
        return self._mailbox

    def ask(self, request: GroupRequest) -> None:
        """Send a request to the current run, if there is one."""
        mailbox = self._mailbox
        if mailbox is not None:
            with contextlib.suppress(RayError):  # the run's mailbox has just ended
                mailbox.ask(request).get()

    def limit(self, limit: WorkerLimit) -> None:
        """Limit the workers of the current run and of later ones."""
        self._limit = limit
        mailbox = self._mailbox  # read after the limit is set: a mailbox that opens meanwhile gets the limit
        if mailbox is not None:
            with contextlib.suppress(RayError):  # the run's mailbox has just ended
                mailbox.limit_workers(limit).get()

    def post(self, event: Event) -> None:
        """Post an event of the driver to the listeners of the current run, if there is one."""
        mailbox = self._mailbox
        if mailbox is not None:
            with contextlib.suppress(RayError):
                mailbox.post([event]).get()

    def claim(self, config: Config) -> None:
        """Claim workers for a new run."""
        with self._lock:
            if self._waits is not None:
                self._waits.cancel()
            self._waits = None
            if self.share is not None:
                self.share.claim(config)

    def free(self) -> None:
        """Free the workers of an ended run. They stay up for ``_NEXT_S``, so that the next run starts in them within a
        second."""
        with self._lock:
            self._waits = threading.Timer(_NEXT_S, self._end_waiting)
            self._waits.daemon = True
            self._waits.start()

    def end(self) -> None:
        """End the processes and the mailbox, and give all workers back."""
        with self._lock:
            self._waits = None
            self._end_processes()
            self.processes = WorkerProcessPool()
            if self._mailbox is not None:
                ray.kill(self._mailbox.actor)
            self._mailbox = None

    def _end_waiting(self) -> None:
        with self._lock:
            if self._waits is not None:  # skip if another run has started
                self._waits = None
                self._end_processes()

    def _end_processes(self) -> None:
        self.processes.end()
        if self.share is not None:
            self.share.release()


def workers_of(config: Config, is_alone: bool) -> WorkerLender:
    """Return a driver's workers for ``config``. If the run is in a queue, it shares the cluster's workers with other runs.
    ``is_alone``: the cluster was started for this driver."""
    return WorkerLender(QueueClient()) if config.run.queue else WorkerLender(is_alone=is_alone)
