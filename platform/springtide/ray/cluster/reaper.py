"""Clean up after a private cluster, however its driver ended: ``python reaper.py FOLDER``, with a pipe as standard input
that the driver holds open.

Ray's daemons notice a killed driver, but two of its agents linger for minutes, and nothing removes the folder. This process
waits for the pipe to close, ends the processes that still use the folder, and removes the folder. It imports only the standard
library, so that it costs a few megabytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

_PATIENCE_S = 30.0
_LOOK_EVERY_S = 0.2
MARK = "SPRINGTIDE_RAY_FOLDER"
"""Environment variable that holds the cluster's folder. The driver sets it, and the cluster's processes inherit it."""


def wait_and_reap(folder: str) -> None:
    """Wait until standard input ends; then kill all cluster processes that use ``folder``, and remove the folder."""
    driver = os.getppid()
    sys.stdin.buffer.read()
    deadline = time.monotonic() + _PATIENCE_S
    while (left := processes_of(folder) - {driver, os.getpid()}) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_EVERY_S)  # give the kernel time to end them
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: str) -> set[int]:
    """Return the ids of the cluster's processes that use ``folder``: it is on their command line, or they have a file in it
    open. (Ray's agents change their command line, but keep their logs there open.) A user's own process that reads a log there
    is not returned."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z" or not _is_of_cluster(entry, folder):
                continue
            named = folder.encode() in (entry / "cmdline").read_bytes()
            if named or any(os.readlink(link).startswith(folder) for link in (entry / "fd").iterdir()):
                found.add(int(entry.name))
    return found


def _is_of_cluster(entry: Path, folder: str) -> bool:
    """Return True if a process belongs to the cluster: it has inherited the variable ``MARK`` from the driver, or has a title
    set by Ray, which overwrites the variables in memory."""
    title = (entry / "cmdline").read_bytes()
    return title.startswith((b"ray::", b"ray-")) or f"{MARK}={folder}".encode() in (
        entry / "environ"
    ).read_bytes().split(b"\0")


if __name__ == "__main__":
    wait_and_reap(sys.argv[1])
