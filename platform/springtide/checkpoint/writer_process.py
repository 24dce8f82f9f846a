"""The process that writes a rank's checkpoints to the store, and the trainer's handle to this process. One job at a time:

    trainer: WriterProcess                        python -m springtide.checkpoint.writer_process FD
        share    ------ STAGE, size, fd ----->    maps this staging buffer instead of the previous one
        save     ------ SAVE, job, tries ---->    writes the job, in up to ``tries`` tries
        cancel   ------ CANCEL, step -------->    stops waiting for the other ranks' parts of that step
        answer   <----- Committed or error ---    then removes old files, and reads the next message
        release  ------ RELEASE ------------->    unmaps the staging buffer
        close    ------ end of file --------->    finishes its job and exits

FD is the writer's end of a socket pair. The writer process does not import torch and does not share a GIL with training. If the
trainer dies, the writer finishes its current save and exits. The save is committed if the writers of the other ranks finish
too. When the writer exits, the staging buffer's memory is freed.
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
"""Arguments of the Python interpreter that start the writer process."""
_STAGE, _SAVE, _CANCEL, _RELEASE = "stage", "save", "cancel", "release"
_ORPHAN_PATIENCE_S = 60.0
"""How long a writer waits for the other ranks after its trainer has died [s]."""
_BACKOFF_S = (0.5, 15.0)
"""Shortest and longest pause after a failed try to write a save [s]."""

_log = logging.getLogger(__name__)

View = Callable[[StagedPiece], memoryview]


class WriterProcess:
    """The trainer's handle to a running writer process. Messages to a dead process are lost; ``answer`` reports its death."""

    def __init__(self) -> None:
        """Start the writer process with the ``sys.path`` of this process: PYTHONPATH lacks entries that were added after this
        process started."""
        self._connection, theirs = multiprocessing.Pipe()
        path = f"PYTHONPATH={os.pathsep.join(sys.path)}"
        # -P: do not put the working directory in front of PYTHONPATH
        command = ["env", path, sys.executable, "-P", *PROGRAM, str(theirs.fileno())]
        # in a new session: torchrun and terminals signal the whole process group, but only the trainer may stop a save
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
        """Make the writer process map ``fd`` as the staging buffer of all later saves. ``size_bytes``: size of the tensors'
        bytes, without the buffer's header."""
        self._send(_STAGE, MARK_BYTES + size_bytes)
        with contextlib.suppress(OSError):  # the process is dead: ``answer`` reports it
            send_handle(self._connection, fd, self.pid)

    def save(self, job: CommitJob, tries: int) -> None:
        """Make the writer process write ``job`` from the staging buffer, in at most ``tries`` tries."""
        self._send(_SAVE, job, tries)

    def cancel(self, step: int) -> None:
        """Make the job of ``step`` fail, so that it does not wait for the parts of other ranks. Has no effect before ``save``
        has sent the job."""
        self._send(_CANCEL, step)

    def answered(self) -> bool:
        """Return True if ``answer`` would return or raise without waiting."""
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
        """Make the writer process unmap the staging buffer, so that the buffer's memory can be freed."""
        self._send(_RELEASE)

    def close(self, wait_s: float = 0.0) -> None:
        """Let the process exit after its job. Waits at most ``wait_s`` for its exit."""
        self._connection.close()
        if wait_s:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a slow store: the writer exits later
                self._process.wait(wait_s)

    def _send(self, *message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            _log.warning("cannot send to the writer process, it has exited: %s", error)


class SpareWriter:
    """At most one idle writer process, kept for the next worker group of this process.

    When a worker group ends, it leaves its writer here, and the next group takes the writer over. So a restart does not start a
    new writer process, which takes half a second to a second of CPU time. Such a start would slow down the building of the
    model, or delay the first save.
    """

    def __init__(self) -> None:
        self._writer: WriterProcess | None = None

    def take(self) -> WriterProcess | None:
        """Return the spare writer if there is one and it is alive. The caller then owns it."""
        writer, self._writer = self._writer, None
        return writer if writer is not None and writer.alive else None

    def leave(self, writer: WriterProcess) -> None:
        """Keep ``writer``, which is idle, as the spare writer. The previous spare writer exits."""
        self.close()
        writer.release()
        self._writer = writer

    def close(self) -> None:
        """Let the spare writer exit, if there is one."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def try_to_write(writer: PieceWriter, job: CommitJob, view: View, gone: Callable[[], bool], tries: int) -> Any:
    """Write ``job``. Return ``Committed``, or the last error. An OSError may be transient: after it, the job is tried again, up
    to ``tries`` tries in total."""
    for left in reversed(range(tries)):
        try:
            return writer.write(job, view, gone)
        except SpringtideError as error:
            return error
        except OSError as error:
            reason = error
        _log.warning("checkpoint %s, rank %d: %s; %d tries left", job.name, job.rank, reason, left)
        if left:
            # the pause doubles with each try, with random jitter: ranks that failed together should not retry together
            longest = min(_BACKOFF_S[1], _BACKOFF_S[0] * 2 ** (tries - left))
            time.sleep(random.uniform(longest / 2, longest))
            if gone():
                break
    return reason


class _Pipe:
    """The writer process's end of the socket pair that connects it to the trainer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stage = memoryview(b"")
        self._step = -1
        self._orphan_since = 0.0

    def next(self) -> tuple[CommitJob, int] | None:
        """Handle messages up to the next job; return the job and its number of tries. None if the trainer has exited."""
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
        """Return the bytes of ``staged``, a part of a tensor, in the staging buffer."""
        end = staged.begin + staged.size_bytes
        if end > len(self._stage):
            raise ValueError(f"{staged.tensor} ends at byte {end} of a staging buffer of {len(self._stage)} bytes")
        return self._stage[staged.begin : end]

    def gone(self) -> bool:
        """Return True if the trainer canceled the job, or has been dead for longer than _ORPHAN_PATIENCE_S."""
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
    """Write the saves (jobs) that the trainer sends, until the trainer has exited."""
    os.nice(10)  # lower priority: training comes first where cores are scarce
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
