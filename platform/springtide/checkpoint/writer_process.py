"""Writer process of a rank's saves: ``python -m springtide.checkpoint.writer_process FD``, FD one end of a socket pair.

It does not import torch and does not share a GIL with training. If the trainer dies, the writer finishes its current
save, commits if the other ranks' writers finish theirs, and ends; the staging buffer's memory is freed with it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from springtide.checkpoint.commit import CommitJob, Committed, PieceWriter, tidy
from springtide.checkpoint.format import MARK_BYTES, StagedPiece
from springtide.errors import SpringtideError
from springtide.store import Folder

STAGE, SAVE, CANCEL, RELEASE = "stage", "save", "cancel", "release"
_ORPHAN_PATIENCE_S = 60.0
"""How long a writer waits for the other ranks after its trainer has died [s]."""
_BACKOFF_S = (0.5, 15.0)

_log = logging.getLogger(__name__)


def try_to_write(
    writer: PieceWriter, job: CommitJob, view: Callable[[StagedPiece], memoryview], gone: Callable[[], bool], tries: int
) -> Any:
    """Return ``Committed``, or the error after at most ``tries`` tries; only OSErrors, which may be transient, are retried."""
    for left in reversed(range(tries)):
        try:
            return writer.write(job, view, gone)
        except SpringtideError as error:
            return error
        except OSError as error:
            reason = error
        _log.warning("checkpoint %s, rank %d: %s; %d tries left", job.name, job.rank, reason, left)
        if left:
            longest = min(_BACKOFF_S[1], _BACKOFF_S[0] * 2 ** (tries - left))
            time.sleep(
                random.uniform(longest / 2, longest)
            )  # jitter: the ranks failed together, and should not retry together
            if gone():
                break
    return reason


class _Pipe:
    """The writer's end of the socket pair."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stages: dict[int, mmap.mmap] = {}
        self._step = -1
        self._orphan_since = 0.0

    def next(self) -> tuple[CommitJob, int, int] | None:
        """Return the next job, the number of its staging buffer, and the number of tries; None if the trainer is gone."""
        while True:
            try:
                kind, *values = self._connection.recv()
                if kind == STAGE:
                    number, size = values
                    fd = recv_handle(self._connection)
                    self._stages[number] = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
                    os.close(fd)
                elif kind == RELEASE:
                    self._stages.clear()
                elif kind == SAVE:
                    job, stage, tries = values
                    self._step = job.meta.step
                    return job, stage, tries
            except (EOFError, OSError):
                return None

    def view(self, stage: int) -> Callable[[StagedPiece], memoryview]:
        whole = memoryview(self._stages[stage])[MARK_BYTES:]
        return lambda staged: whole[staged.begin : staged.begin + staged.size_bytes]

    def gone(self) -> bool:
        """Return whether the trainer canceled the job, or has been dead for longer than _ORPHAN_PATIENCE_S."""
        try:
            while self._connection.poll():
                if self._connection.recv() == (CANCEL, self._step):
                    return True
        except (EOFError, OSError):
            self._orphan_since = self._orphan_since or time.monotonic()
        return bool(self._orphan_since) and time.monotonic() - self._orphan_since > _ORPHAN_PATIENCE_S

    def tell(self, result: Committed | BaseException) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(result)


def main() -> None:
    """Write the jobs that arrive, until the trainer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is for the trainer, which decides
    os.nice(10)  # where cores are scarce, training comes first
    logging.basicConfig(level=logging.WARNING, format="springtide writer: %(message)s")
    line = _Pipe(Connection(int(sys.argv[1])))
    writers: dict[str, PieceWriter] = {}
    while (found := line.next()) is not None:
        job, stage, tries = found
        writer = writers.setdefault(job.run_url, PieceWriter(Folder(job.run_url)))
        result = try_to_write(writer, job, line.view(stage), line.gone, tries)
        line.tell(result)
        if job.rank == 0 and isinstance(result, Committed):
            tidy(Folder(job.run_url), job)


if __name__ == "__main__":
    main()
