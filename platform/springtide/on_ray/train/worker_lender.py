"""What a driver keeps for one run after the other: what it holds of a pool, worker processes, the exchange they talk through.
Each takes a second or more to start."""

from __future__ import annotations

import contextlib
import threading

import ray
from ray.exceptions import RayError

from springtide.config import Config
from springtide.elastic import Interrupt
from springtide.errors import RunExists
from springtide.on_ray.train.group import WorkerProcessPool
from springtide.on_ray.train.mailbox import MailboxHandle, open_mailbox
from springtide.on_ray.tune.worker_pool import WorkerPoolClient

_NEXT_S = 10.0
"""How long the workers of a trial that is over wait for the next one."""


class WorkerLender:
    """Of one driver."""

    def __init__(self, share: WorkerPoolClient | None = None) -> None:
        """``share``: which of the cluster's workers are this driver's, where others have the rest."""
        self.share = share
        self.processes = WorkerProcessPool()
        self._control: MailboxHandle | None = None
        self._waits: threading.Timer | None = None
        self._lock = threading.Lock()

    def control(self, config: Config) -> MailboxHandle:
        """The line of a run that begins. RunExists when another driver of this cluster trains it."""
        name = f"run-{config.run.id}" if self.share is None else None  # trials are guarded by their sweep
        try:
            self._control = open_mailbox(name, config.num_steps, float(config.elastic.hang), self._control)
        except ValueError:
            raise RunExists(
                f"run {config.run.id!r} is being trained on this cluster by another driver; wait for it or stop it"
            ) from None
        return self._control

    def ask(self, interrupt: Interrupt) -> None:
        """Ask something of the run that is trained now, if one is."""
        control = self._control
        if control is not None:
            with contextlib.suppress(RayError):  # it has just ended
                ray.get(control.ask(interrupt.value))

    def claim(self, config: Config) -> None:
        """For a run that begins."""
        with self._lock:
            if self._waits is not None:
                self._waits.cancel()
            self._waits = None
            if self.share is not None:
                self.share.claim(config)

    def free(self) -> None:
        """The run is over: its processes wait a little, the next one begins in them in a second."""
        with self._lock:
            self._waits = threading.Timer(_NEXT_S, self._end_waiting)
            self._waits.daemon = True
            self._waits.start()

    def end(self) -> None:
        """Give everything back."""
        with self._lock:
            self._waits = None
            self._end_processes()
            self.processes = WorkerProcessPool()
            if self._control is not None:
                ray.kill(self._control.exchange)
            self._control = None

    def _end_waiting(self) -> None:
        with self._lock:
            if self._waits is not None:  # no other run has begun
                self._waits = None
                self._end_processes()

    def _end_processes(self) -> None:
        self.processes.end()
        if self.share is not None:
            self.share.release()
