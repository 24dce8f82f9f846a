"""The fault points of a run, at which tests inject faults, and how a process reports that it has reached one.

    this process: fault_point("restore", "before") --> point, when, pid --> the test: injects a fault, or not
                  continues                  <-------- "go" --------

A process reports a fault point only if it is armed, which means that it has received the address of a test. Armed are the
test's own process, in which the controller runs; each worker (by ``TrainJob``); each worker's checkpoint writer process (by
``CommitJob``); and the snapshot servers (by ``SnapshotServer.follow``).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Literal

Point = Literal["shutdown", "take", "rendezvous", "first_collective", "claim", "restore", "replicate", "commit"]
When = Literal["before", "after"]

POINTS: dict[Point, str] = {
    "shutdown": "controller: a group that has ended gives its processes back",
    "take": "controller: the processes of the next group are taken, and started where some lack",
    "rendezvous": "controller before, each worker after: the workers form a process group",
    "first_collective": "each worker: the group's first collective",
    "claim": "rank 0: the group claims the run's lease",
    "restore": "each worker: the state is loaded, from memory or from the store",
    "replicate": "snapshot server: a rank's snapshot is copied to the peers",
    "commit": "writer process of rank 0: the marker of a checkpoint is created",
}
"""Fault point -> the process that reports it, and the action. Each point is reported before and after the action."""

_HOLD_S = 60.0
"""Longest time that a process waits at a fault point for the test's reply [s]. Then it continues."""

_address = ""


def arm(address: str) -> None:
    """Make this process report its fault points to the test that listens at ``address``, a Unix socket. With an empty
    ``address`` the process reports no fault points."""
    global _address
    _address = address


def armed() -> str:
    """Return the address of the listening test, so that it can be passed to child processes; empty without a test."""
    return _address


def fault_point(point: Point, when: When) -> None:
    """Report a fault point to the test, and wait until the test lets this process continue. Does nothing in a process that is
    not armed."""
    if _address:
        _report(_address, point, when)


def _report(address: str, point: Point, when: When) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:  # the test's server may have ended
        connection.settimeout(_HOLD_S)
        connection.connect(address)
        connection.sendall(json.dumps([point, when, os.getpid()], allow_nan=False).encode())
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
