"""Training side of a save: copy the state to a staging buffer (shared memory), send the job to the writer process, and receive
the outcome. One save at a time.

The saver is always in one of five states. These are all transitions:

               begin                    handed over
    Idle ----------------> Copying ------------------> Writing
     | ^                      |                           |
     | |                      | the copy failed           | result received, or writer died
     | |       poll           v                           |
     | +------------------- Done <------------------------+
     |                        ^
     +------------------------+                       any state -- close, end --> Closed
       begin, if training waits for the save

    state     means                                          owns
    Idle      a save may begin                               writer process and staging buffer, if they exist
    Copying   tensors -> staging buffer, then SAVE is sent   writer process, buffer, and the future of the thread that copies
    Writing   the writer process has the job                 writer process and buffer, whose bytes may not change
    Done      ``poll`` has not returned the outcome yet      the outcome, and the Idle state that follows
    Closed    no further save                                nothing

``poll`` moves the saver from Copying to Writing, to Done and to Idle. ``cancel`` and ``close`` first wait for the end of
Copying. ``start`` starts the writer process; the state stays Idle. ``begin`` starts a new writer if the previous writer died
while it was idle. If a writer dies during a job, that save fails, and the staging buffer is kept for the next save. If no
staging buffer can be allocated, training waits until this save, and each later save, is written. If ``close`` is called in
Writing, the writer finishes its save and exits.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Self

import torch
from torch import Tensor

from springtide.checkpoint.commit import CommitJob, Committed, PieceWriter, tidy
from springtide.checkpoint.format import Meta, StagedPiece
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.staging import StagingBuffer, StagingPlan, in_thread
from springtide.checkpoint.tensors import local, raw
from springtide.checkpoint.writer_process import SpareWriter, WriterProcess, try_to_write
from springtide.faults import armed
from springtide.storage import Folder

_LEAVING_S = 30.0
"""How long ``end``, called after the last save, waits for the writer process to exit [s]."""
_PATIENCE_S = 600.0
"""How long rank 0 waits for the files of the other ranks if it writes the save itself, without a writer process [s]."""
SPARE = SpareWriter()
"""Keeps the idle writer process of a finished worker group for the next worker group. It is global because successive worker
groups share only the operating-system process that they train in. The writer exits when that process exits."""
atexit.register(SPARE.close)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SaveOutcome:
    """Result of a save on this rank."""

    step: int
    written: Committed | None
    """Name and size of what this rank wrote; None if the save failed."""
    error: BaseException | None

    @classmethod
    def of(cls, step: int, answer: Any) -> Self:
        """Return the outcome of the save of ``step``. ``answer``: what the writer returned, ``Committed`` or an exception."""
        return cls(step, answer, None) if isinstance(answer, Committed) else cls(step, None, answer)


@dataclasses.dataclass(frozen=True)
class Idle:
    """State of a saver: no save is in progress, and a save may begin."""

    writer: WriterProcess | None = None
    """The writer process; None if none runs. If ``stage`` exists too, the writer has mapped this staging buffer."""
    stage: StagingBuffer | None = None


@dataclasses.dataclass(frozen=True)
class Copying:
    """The tensors are being copied to the staging buffer. Then a thread sends the job to the writer process."""

    step: int
    writer: WriterProcess
    stage: StagingBuffer
    handed_over: Future[None]

    def next(self) -> Writing | Done:
        """Wait until the copy is complete and the job is sent. Returns the saver's next state."""
        error = self.handed_over.exception()
        if error is None:
            return Writing(self.step, self.writer, self.stage)
        reason = RuntimeError(f"the state could not be copied to the staging buffer: {error}")
        return Done(SaveOutcome(self.step, None, reason), Idle(self.writer, self.stage))


@dataclasses.dataclass(frozen=True)
class Writing:
    """The writer process writes the contents of the staging buffer to the store."""

    step: int
    writer: WriterProcess
    stage: StagingBuffer

    def next(self) -> Done:
        """Wait for the result of the writer process, or its death. Returns the saver's next state."""
        try:
            return Done(SaveOutcome.of(self.step, self.writer.answer()), Idle(self.writer, self.stage))
        except OSError as death:
            return Done(SaveOutcome(self.step, None, death), Idle(None, self.stage))


@dataclasses.dataclass(frozen=True)
class Done:
    """The save has ended with an outcome (written or failed), which ``poll`` has not returned yet."""

    outcome: SaveOutcome
    idle: Idle


@dataclasses.dataclass(frozen=True)
class Closed:
    """The saver is closed: no further save can begin."""


State = Idle | Copying | Writing | Done | Closed


class AsyncSaver:
    """Saves the state of one rank. Use as a context manager: on exit, a busy writer process finishes its save and exits. An
    idle writer process is kept for the next worker group that trains in this process."""

    def __init__(
        self,
        run: Folder,
        term: int,
        rank: int,
        world_size: int,
        *,
        stage_in: str,
        tries: int,
        rule: Rule,
        owner: str = "",
    ) -> None:
        """``term``: number of the lease (right to write the run) that this worker group holds under the id ``owner``.
        ``stage_in``: folder of a memory file system, such as /dev/shm, for the staging buffer; if empty, training waits until
        each save is written. ``tries``: how often a save is tried if errors may be transient. ``rule``: which checkpoints to
        keep."""
        self._run, self._term, self._rank, self._owner = run, term, rank, owner
        self._layout = StagingPlan(rank, world_size)
        self._stage_in, self._tries, self._rule = stage_in, tries, rule
        self._state: State = Idle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def state(self) -> State:
        return self._state

    @property
    def busy(self) -> bool:
        """True if a save is in progress on this rank, or ``poll`` has not returned its outcome yet."""
        return isinstance(self._state, Copying | Writing | Done)

    def start(self) -> None:
        """Start the writer process now, so that the first save does not wait for the process."""
        self._state = _with_writer(self._idle("start its writer process"))

    def begin(self, tensors: Mapping[str, Tensor], meta: Meta, config: dict[str, Any]) -> None:
        """Begin a save. The tensors must not change before ``staged`` returns. Without a staging buffer, the save is complete
        when this returns. Raises RuntimeError if ``busy`` or closed."""
        idle = self._idle(f"begin to save step {meta.step}")
        mine, pieces = self._layout.of(tensors), self._layout.pieces
        job = CommitJob(self._run.url, self._term, self._rank, meta, config, pieces, self._rule, self._owner, armed())
        if self._stage_in:
            self._state = idle = self._with_stage(_with_writer(idle), self._layout.size_bytes)
        match idle:
            case Idle(WriterProcess() as writer, StagingBuffer() as stage):
                stage.copy(mine, pieces)
                handed_over = in_thread(
                    "springtide-hand-over", lambda: self._hand_over(job, writer, stage), daemon=False
                )
                self._state = Copying(meta.step, writer, stage, handed_over)
            case _:
                self._state = Done(self._write_here(job, mine), idle)

    def staged(self) -> None:
        """Wait until the copy has read the tensors, so that training may change them again."""
        if isinstance(self._state, Copying):
            self._state.stage.wait()

    def poll(self, wait: bool = False) -> SaveOutcome | None:
        """Return the outcome of the current save. Each outcome is returned only once. None while the save is in progress, or if
        there is no save. ``wait``: wait until the save has ended."""
        if isinstance(self._state, Copying) and (wait or self._state.handed_over.done()):
            self._state = self._state.next()
        if isinstance(self._state, Writing) and (wait or self._state.writer.answered()):
            self._state = self._state.next()
        if not isinstance(self._state, Done):
            return None
        outcome, self._state = self._state.outcome, self._state.idle
        return outcome

    def cancel(self) -> None:
        """On rank 0: stop waiting for the files of the other ranks, so that the save fails. A copy in progress is completed
        first."""
        if isinstance(self._state, Copying):  # the writer ignores a CANCEL message that arrives before its SAVE message
            self._state = self._state.next()
        if isinstance(self._state, Writing):
            self._state.writer.cancel(self._state.step)

    def end(self) -> None:
        """After the last save: wait at most _LEAVING_S for the writer process to remove old checkpoints and exit."""
        self._close(keep=False)

    def close(self) -> None:
        """Release the staging buffer and the writer process. A save in progress continues; its outcome is not reported."""
        self._close(keep=True)

    def _close(self, keep: bool) -> None:
        state, self._state = self._state, Closed()
        if isinstance(state, Copying):
            state = state.next()
        if isinstance(state, Done):
            state = state.idle
        if isinstance(state, Closed):
            return
        if state.stage is not None:
            state.stage.close()
        match state:
            case Writing(_, writer):
                writer.close()
            case Idle(WriterProcess() as writer) if keep:
                SPARE.leave(writer)
            case Idle(WriterProcess() as writer):
                writer.close(_LEAVING_S)

    def _idle(self, purpose: str) -> Idle:
        """Return the current state if it is Idle, else raise RuntimeError. ``purpose``: the refused action, for the error
        message."""
        match self._state:
            case Idle() as idle:
                return idle
            case Closed():
                reason = "it is closed"
            case Done(outcome):
                reason = f"poll has not returned the outcome of step {outcome.step}"
            case Copying(step) | Writing(step):
                reason = f"the save of step {step} is under way"
        raise RuntimeError(f"the saver of rank {self._rank} cannot {purpose}: {reason}")

    def _with_stage(self, idle: Idle, size_bytes: int) -> Idle:
        """Return ``idle`` with a staging buffer of at least ``size_bytes``; without a buffer if there is too little memory."""
        if idle.stage is not None and idle.stage.size_bytes >= size_bytes:
            return idle
        if idle.stage is not None:
            idle.stage.close()
        try:
            stage = StagingBuffer(self._stage_in, size_bytes)
        except OSError as error:
            _log.warning(
                "cannot allocate %d MiB to stage a save in %s (%s): training waits for each save; free space there, "
                "or set checkpoint.stage to a folder of a larger memory file system",
                size_bytes >> 20,
                self._stage_in,
                error,
            )
            self._stage_in = ""
            return Idle(idle.writer)
        if idle.writer is not None:
            idle.writer.share(stage.fd, stage.size_bytes)
        return Idle(idle.writer, stage)

    def _hand_over(self, job: CommitJob, writer: WriterProcess, stage: StagingBuffer) -> None:
        stage.settle()
        writer.save(job, self._tries)

    def _write_here(self, job: CommitJob, tensors: Mapping[str, Tensor]) -> SaveOutcome:
        def view(staged: StagedPiece) -> memoryview:
            return raw(local(tensors[staged.tensor]).contiguous().cpu()).numpy().data

        with torch.no_grad():
            # a deadline ends this save if another rank fails: training waits here, so it cannot call ``cancel``
            deadline = time.monotonic() + _PATIENCE_S
            result = try_to_write(PieceWriter(self._run), job, view, lambda: time.monotonic() > deadline, self._tries)
            if job.rank == 0 and isinstance(result, Committed):
                tidy(self._run, job)
        return SaveOutcome.of(job.meta.step, result)


def _with_writer(idle: Idle) -> Idle:
    """Return ``idle`` with a live writer process that has mapped the staging buffer of ``idle``."""
    if idle.writer is not None and idle.writer.alive:
        return idle
    writer = SPARE.take() or WriterProcess()
    if idle.stage is not None:
        writer.share(idle.stage.fd, idle.stage.size_bytes)
    return Idle(writer, idle.stage)
