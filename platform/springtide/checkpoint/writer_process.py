"""The writer process of a rank's saves, and the trainer's end of it. One job at a time:

    trainer: WriterProcess                        python -m springtide.checkpoint.writer_process FD
        share    ------ STAGE, size, fd ----->    maps the staging buffer in place of the one before
        save     ------ SAVE, job, tries ---->    writes it, up to ``tries`` times
        cancel   ------ CANCEL, step -------->    stops waiting for the other ranks' parts of that job
        answer   <----- Committed or error ---    then removes old files, and reads the next message
        release  ------ RELEASE ------------->    unmaps the staging buffer
        close    ------ end of file --------->    finishes its job and ends

FD is one end of a socket pair. The process does not import torch and does not share a GIL with training. If the trainer
dies, the writer finishes its current save, commits if the other ranks' writers finish theirs, and ends; the staging
buffer's memory is freed with it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from springtide.checkpoint.commit import CommitJob, Committed, KnownCheckpoints, PieceWriter, tidy
from springtide.checkpoint.format import StagedPiece
from springtide.checkpoint.shared_memory import MARK_BYTES
from springtide.errors import SpringtideError
from springtide.faults import arm
from springtide.storage import Folder

PROGRAM = ("-m", "springtide.checkpoint.writer_process")
"""What Python runs as the writer process."""
_STAGE, _SAVE, _CANCEL, _RELEASE = "stage", "save", "cancel", "release"
_ORPHAN_PATIENCE_S = 60.0
"""How long a writer waits for the other ranks after its trainer has died [s]."""
_BACKOFF_S = (0.5, 15.0)
"""Shortest pause after a failed try, and the longest [s]."""

_log = logging.getLogger(__name__)

View = Callable[[StagedPiece], memoryview]


class WriterProcess:
    """The trainer's end of a running writer process. A message to a dead process is lost: ``answer`` reports the death."""

    def __init__(self) -> None:
        """Start the process, with this one's ``sys.path``, which may not come from its environment."""
        self._connection, theirs = multiprocessing.Pipe()
        path = f"PYTHONPATH={os.pathsep.join(sys.path)}"
        # -P: that path alone, not the working directory before it
        command = ["env", path, sys.executable, "-P", *PROGRAM, str(theirs.fileno())]
        # a session of its own: torchrun and terminals signal the whole process group, and the trainer decides what is saved
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def share(self, fd: int, size_bytes: int) -> None:
        """Have the process map this file: the staging buffer of all later saves, of ``size_bytes`` after the mark."""
        self._send(_STAGE, MARK_BYTES + size_bytes)
        with contextlib.suppress(OSError):  # as in ``_send``
            send_handle(self._connection, fd, self.pid)

    def save(self, job: CommitJob, tries: int) -> None:
        """Have a job written from the staging buffer, in at most ``tries`` tries."""
        self._send(_SAVE, job, tries)

    def cancel(self, step: int) -> None:
        """Have the job of this step fail instead of waiting for the other ranks' parts. Goes unheard before its ``save``."""
        self._send(_CANCEL, step)

    def answered(self) -> bool:
        """Return whether ``answer`` returns, or raises, at once."""
        try:
            return self._connection.poll()
        except OSError:
            return True

    def answer(self) -> Any:
        """Wait for the result of the job: ``Committed``, or the error. Raises OSError if the process has died."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            self._connection.close()
            raise OSError(f"the writer process ended with status {self._process.wait()}") from None

    def release(self) -> None:
        """Have the staging buffer unmapped."""
        self._send(_RELEASE)

    def close(self, wait_s: float = 0.0) -> None:
        """Let the process end after its job; wait for that, at most ``wait_s``."""
        self._connection.close()
        if wait_s:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a slow store may take longer
                self._process.wait(wait_s)

    def _send(self, *message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            _log.warning("the writer process is gone: %s", error)


class SpareWriter:
    """At most one idle writer process that waits for its next trainer.

    A worker group that ends leaves its writer here for the next one of the same process. That spares a restart the start of
    another: half a second to a second of a core that builds the model at that moment, or the first save's wait for it.
    """

    def __init__(self) -> None:
        self._writer: WriterProcess | None = None

    def take(self) -> WriterProcess | None:
        """Return the spare writer if there is one and it is alive; from now on it is the caller's."""
        writer, self._writer = self._writer, None
        return writer if writer is not None and writer.alive else None

    def leave(self, writer: WriterProcess) -> None:
        """Take over an idle writer; the one before it ends."""
        self.close()
        writer.release()
        self._writer = writer

    def close(self) -> None:
        """Let the spare writer end, if there is one."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def try_to_write(writer: PieceWriter, job: CommitJob, view: View, gone: Callable[[], bool], tries: int) -> Any:
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
            # twice as long after every try; jitter, because the ranks failed together and should not retry together
            longest = min(_BACKOFF_S[1], _BACKOFF_S[0] * 2 ** (tries - left))
            time.sleep(random.uniform(longest / 2, longest))
            if gone():
                break
    return reason


class _Pipe:
    """The writer's end of the socket pair."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stage = memoryview(b"")
        self._step = -1
        self._orphan_since = 0.0

    def next(self) -> tuple[CommitJob, int] | None:
        """Return the next job and the number of tries; None if the trainer is gone."""
        while True:
            try:
                kind, *values = self._connection.recv()
                if kind == _STAGE:
                    [size], fd = values, recv_handle(self._connection)
                    self._stage = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ))[MARK_BYTES:]
                    os.close(fd)
                elif kind == _RELEASE:
                    self._stage = memoryview(b"")
                elif kind == _SAVE:
                    job, tries = values
                    self._step = job.meta.step
                    return job, tries
            except (EOFError, OSError):
                return None

    def view(self, staged: StagedPiece) -> memoryview:
        """Return a piece's bytes in the staging buffer."""
        end = staged.begin + staged.size_bytes
        if end > len(self._stage):
            raise ValueError(f"{staged.tensor} ends at byte {end} of a staging buffer of {len(self._stage)} bytes")
        return self._stage[staged.begin : end]

    def gone(self) -> bool:
        """Return whether the trainer canceled the job, or has been dead for longer than _ORPHAN_PATIENCE_S."""
        try:
            while self._connection.poll():
                if self._connection.recv() == (_CANCEL, self._step):
                    return True
        except (EOFError, OSError):
            self._orphan_since = self._orphan_since or time.monotonic()
        return bool(self._orphan_since) and time.monotonic() - self._orphan_since > _ORPHAN_PATIENCE_S

    def send(self, result: Committed | BaseException) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(result)


def main() -> None:
    """Write the jobs that arrive, until the trainer is gone."""
    os.nice(10)  # where cores are scarce, training comes first
    logging.basicConfig(level=logging.WARNING, format="springtide writer: %(message)s")
    pipe = _Pipe(Connection(int(sys.argv[1])))
    writers: dict[str, PieceWriter] = {}
    known: dict[str, KnownCheckpoints] = {}
    while (found := pipe.next()) is not None:
        job, tries = found
        arm(job.fault_points)
        writer = writers.setdefault(job.run_url, PieceWriter(Folder(job.run_url)))
        result = try_to_write(writer, job, pipe.view, pipe.gone, tries)
        pipe.send(result)
        if job.rank == 0 and isinstance(result, Committed):
            tidy(Folder(job.run_url), job, known.setdefault(job.run_url, {}))


if __name__ == "__main__":
    main()
