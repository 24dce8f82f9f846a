"""Training side of a save: stage the state, hand it to the writer process, receive the outcome. One save at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, Self

import torch
from torch import Tensor

from springtide.checkpoint.commit import CommitJob, Committed, PieceWriter, tidy
from springtide.checkpoint.format import MARK_BYTES, Meta, StagedPiece
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.staging import StagingBuffer, StagingPlan
from springtide.checkpoint.tensors import local, raw
from springtide.checkpoint.writer_process import CANCEL, RELEASE, SAVE, STAGE, try_to_write
from springtide.store import Folder

WRITER = "from springtide.checkpoint.writer_process import main; main()"
"""Program of the writer process."""
_LEAVING_S = 30.0
_PATIENCE_S = 600.0
"""How long a save in the training process waits for the other ranks [s]."""

_log = logging.getLogger(__name__)


_spare: list[tuple[subprocess.Popen[bytes], Connection]] = []
"""The idle writer process of the previous worker group, if it left one."""


@dataclasses.dataclass(frozen=True)
class SaveOutcome:
    """Result of a save on this rank."""

    step: int
    written: Committed | None
    """None if the save failed."""
    error: BaseException | None


class AsyncSaver:
    """Saves of one rank. Use as a context manager: on exit, a writer process that is busy finishes its save and ends;
    an idle one stays for the next worker group of this process."""

    def __init__(
        self, run: Folder, term: int, rank: int, world_size: int, *, stage_in: str, tries: int, rule: Rule
    ) -> None:
        """``term``: of this group's lease. ``stage_in``: a folder of a memory file system; if empty, nothing is staged
        and training waits for each save. ``tries``: of each save, for errors that may be transient."""
        self._run, self._term, self._rank = run, term, rank
        self._layout = StagingPlan(rank, world_size)
        self._stage_in, self._tries, self._rule = stage_in, tries, rule
        self._stage: StagingBuffer | None = None
        self._stages = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._step: int | None = None
        self._handing_over: threading.Thread | None = None
        self._outcome: SaveOutcome | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._leave()

    @property
    def busy(self) -> bool:
        """Whether a save is in progress on this rank, or ``poll`` has not returned its outcome yet."""
        return self._step is not None

    def begin(self, tensors: Mapping[str, Tensor], meta: Meta, config: dict[str, Any]) -> None:
        """Begin a save. The tensors may not change before ``staged`` returns. ``busy`` must be False."""
        assert not self.busy
        mine, pieces = self._layout.of(tensors), self._layout.pieces
        job = CommitJob(self._run.url, self._term, self._rank, meta, config, pieces, self._rule)
        self._step = meta.step
        if self._ready(self._layout.size_bytes):
            assert self._stage is not None
            self._stage.copy(mine, pieces)
            self._handing_over = threading.Thread(target=self._hand_over, args=(job,), name="springtide-hand-over")
            self._handing_over.start()
        else:
            self._write_here(job, mine)

    def staged(self) -> None:
        """Wait until the tensors may change."""
        if self._stage is not None:
            self._stage.wait()

    def poll(self, wait: bool = False) -> SaveOutcome | None:
        """Return the outcome of the current save, once; None until there is one. ``wait``: wait for it."""
        if self._step is None:
            return None
        if self._outcome is None:
            if self._handing_over is not None and (wait or not self._handing_over.is_alive()):
                self._handing_over.join()
                self._handing_over = None
            if self._handing_over is not None or not (wait or self._answered()):
                return None
            self._outcome = self._hear()
        outcome, self._outcome, self._step = self._outcome, None, None
        return outcome

    def cancel(self) -> None:
        """On rank 0: stop waiting for the other ranks' parts; the save then fails."""
        if self._connection is not None and self.busy:
            self._send(CANCEL, self._step)

    def end(self) -> None:
        """After the last save: wait until the writer process has removed old checkpoints and ended, at most _LEAVING_S."""
        connection, process = self._connection, self._process
        self._leave(keep=False)
        if connection is not None and process is not None and not self.busy:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a slow store may take longer
                process.wait(_LEAVING_S)

    def _leave(self, keep: bool = True) -> None:
        if self._handing_over is not None:
            self._handing_over.join()
        if self._connection is not None and self._process is not None:
            if keep and not self.busy and not _spare:
                self._send(RELEASE)
                _spare.append((self._process, self._connection))
            else:
                self._connection.close()
        if self._stage is not None:
            self._stage.close()
        self._connection = self._process = self._stage = None

    def start(self) -> None:
        """Start the writer process, so that the first save does not wait for it."""
        if self._process is None and _spare:
            self._process, self._connection = _spare.pop()
        if self._process is not None and self._process.poll() is None:
            return
        ours, theirs = multiprocessing.Pipe()
        # with this process's sys.path, which may not come from its environment
        program = f"import sys; sys.path[:] = {sys.path!r}; {WRITER}"
        command = [sys.executable, "-c", program, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._connection = ours
        if self._stage is not None:
            self._send_stage()

    def _ready(self, size_bytes: int) -> bool:
        """Return whether there is a writer process, and a staging buffer of at least ``size_bytes``; create what is missing."""
        if not self._stage_in:
            return False
        self.start()
        if self._stage is not None and self._stage.size_bytes >= size_bytes:
            return True
        if self._stage is not None:
            self._stage.close()
            self._stage = None
        try:
            self._stage = StagingBuffer(self._stage_in, size_bytes)
        except OSError as error:
            _log.warning(
                "cannot allocate %d MiB to stage a save in %s (%s): training waits for saves; free space there, or set "
                "checkpoint.stage to a folder of a larger memory file system",
                size_bytes >> 20,
                self._stage_in,
                error,
            )
            self._stage_in = ""
            return False
        self._send_stage()
        return True

    def _send_stage(self) -> None:
        assert self._stage is not None
        assert self._process is not None
        assert self._connection is not None
        self._stages += 1
        self._send(STAGE, self._stages, MARK_BYTES + self._stage.size_bytes)
        send_handle(self._connection, self._stage.fd, self._process.pid)

    def _hand_over(self, job: CommitJob) -> None:
        assert self._stage is not None
        self._stage.settle()
        self._send(SAVE, job, self._stages, self._tries)

    def _send(self, *message: Any) -> None:
        assert self._connection is not None
        try:
            self._connection.send(message)
        except OSError as error:  # the process is dead: receiving its answer fails and reports it
            _log.warning("the writer process is gone: %s", error)

    def _answered(self) -> bool:
        assert self._connection is not None
        try:
            return self._connection.poll()
        except OSError:
            return True

    def _hear(self) -> SaveOutcome:
        assert self._step is not None
        assert self._connection is not None
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            status = self._process.wait() if self._process is not None else None
            answer = OSError(f"the writer process ended with status {status}")
            self._process = None  # the next save starts another
        return self._as_outcome(answer)

    def _write_here(self, job: CommitJob, tensors: Mapping[str, Tensor]) -> None:
        def view(staged: StagedPiece) -> memoryview:
            return raw(local(tensors[staged.tensor]).contiguous().cpu()).numpy().data

        with torch.no_grad():
            deadline = time.monotonic() + _PATIENCE_S  # nobody can cancel the job while training waits
            result = try_to_write(PieceWriter(self._run), job, view, lambda: time.monotonic() > deadline, self._tries)
            self._outcome = self._as_outcome(result)
            if job.rank == 0 and self._outcome.written is not None:
                tidy(self._run, job)

    def _as_outcome(self, answer: Any) -> SaveOutcome:
        assert self._step is not None
        if isinstance(answer, Committed):
            return SaveOutcome(self._step, answer, None)
        return SaveOutcome(self._step, None, answer)
