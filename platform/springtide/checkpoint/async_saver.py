"""Training side of a save: stage the state, hand it to the writer process, receive the outcome. One save at a time.

The saver is always in one of five states; there are no transitions but these:

               begin                    handed over
    Idle ----------------> Copying ------------------> Writing
     | ^                      |                           |
     | |                      | the copy failed           | an answer, or the writer's death
     | |       poll           v                           |
     | +------------------- Done <------------------------+
     |                        ^
     +------------------------+                       any state -- close, end --> Closed
       begin, nothing staged

    state     means                                          owns
    Idle      a save may begin                               writer process and staging buffer, as far as they exist
    Copying   tensors -> staging buffer, then SAVE is sent   both, and the future of the thread that waits and sends
    Writing   the writer process has the job                 both; their bytes may not change
    Done      the outcome waits for ``poll``                 the outcome, and what Idle will own
    Closed    no save follows                                nothing

Copying and Writing end when ``poll`` looks; ``cancel`` and ``close`` wait for the end of Copying. ``start`` stays in Idle and
adds the writer process. A writer that dies while idle is replaced by ``begin``; the death of one that has a job fails the
save, and the staging buffer is kept. If a buffer cannot be allocated, training waits for this save and all later ones.
After ``close`` in Writing, the writer finishes its save and ends by itself.
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
_PATIENCE_S = 600.0
"""How long a save in the training process waits for the other ranks [s]."""
SPARE = SpareWriter()
"""Process-wide: successive worker groups share nothing but the process that they run in. It ends with that process."""
atexit.register(SPARE.close)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SaveOutcome:
    """Result of a save on this rank."""

    step: int
    written: Committed | None
    """None if the save failed."""
    error: BaseException | None

    @classmethod
    def of(cls, step: int, answer: Any) -> Self:
        """Return the outcome for a writer's answer: ``Committed``, or the error."""
        return cls(step, answer, None) if isinstance(answer, Committed) else cls(step, None, answer)


@dataclasses.dataclass(frozen=True)
class Idle:
    """A save may begin."""

    writer: WriterProcess | None = None
    """It has been sent ``stage``, if there is one."""
    stage: StagingBuffer | None = None


@dataclasses.dataclass(frozen=True)
class Copying:
    """The state is copied to the staging buffer; then the job is sent to the writer process."""

    step: int
    writer: WriterProcess
    stage: StagingBuffer
    handed_over: Future[None]

    def next(self) -> Writing | Done:
        """Wait until the job is handed over."""
        error = self.handed_over.exception()
        if error is None:
            return Writing(self.step, self.writer, self.stage)
        reason = RuntimeError(f"the state could not be copied to the staging buffer: {error}")
        return Done(SaveOutcome(self.step, None, reason), Idle(self.writer, self.stage))


@dataclasses.dataclass(frozen=True)
class Writing:
    """The writer process reads the staging buffer."""

    step: int
    writer: WriterProcess
    stage: StagingBuffer

    def next(self) -> Done:
        """Wait for the writer's answer, or its death."""
        try:
            return Done(SaveOutcome.of(self.step, self.writer.answer()), Idle(self.writer, self.stage))
        except OSError as death:
            return Done(SaveOutcome(self.step, None, death), Idle(None, self.stage))


@dataclasses.dataclass(frozen=True)
class Done:
    """The save has an outcome, which is not reported yet."""

    outcome: SaveOutcome
    idle: Idle


@dataclasses.dataclass(frozen=True)
class Closed:
    """No save follows."""


State = Idle | Copying | Writing | Done | Closed


class AsyncSaver:
    """Saves of one rank. Use as a context manager: on exit, a writer process that is busy finishes its save and ends;
    an idle one stays for the next worker group of this process."""

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
        """``term``: of this group's lease, which ``owner`` holds. ``stage_in``: a folder of a memory file system; if empty,
        nothing is staged and training waits for each save. ``tries``: of each save, for errors that may be transient."""
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
        """Whether a save is in progress on this rank, or ``poll`` has not returned its outcome yet."""
        return isinstance(self._state, Copying | Writing | Done)

    def start(self) -> None:
        """Start the writer process, so that the first save does not wait for it."""
        self._state = _with_writer(self._idle("start its writer process"))

    def begin(self, tensors: Mapping[str, Tensor], meta: Meta, config: dict[str, Any]) -> None:
        """Begin a save. The tensors may not change before ``staged`` returns. Raises RuntimeError if ``busy``, or closed."""
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
        """Wait until the tensors may change."""
        if isinstance(self._state, Copying):
            self._state.stage.wait()

    def poll(self, wait: bool = False) -> SaveOutcome | None:
        """Return the outcome of the current save, once; None until there is one. ``wait``: wait for it."""
        if isinstance(self._state, Copying) and (wait or self._state.handed_over.done()):
            self._state = self._state.next()
        if isinstance(self._state, Writing) and (wait or self._state.writer.answered()):
            self._state = self._state.next()
        if not isinstance(self._state, Done):
            return None
        outcome, self._state = self._state.outcome, self._state.idle
        return outcome

    def cancel(self) -> None:
        """On rank 0: stop waiting for the other ranks' parts; the save then fails. Waits for a copy that is under way."""
        if isinstance(self._state, Copying):  # the writer would not heed a cancellation that overtakes its job
            self._state = self._state.next()
        if isinstance(self._state, Writing):
            self._state.writer.cancel(self._state.step)

    def end(self) -> None:
        """After the last save: wait until the writer process has removed old checkpoints and ended, at most _LEAVING_S."""
        self._close(keep=False)

    def close(self) -> None:
        """Release what is held. A save under way goes on without this rank's hearing of it."""
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
        """Return the state if it is Idle, which alone allows ``purpose``."""
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
        """Return ``idle`` with a staging buffer of at least ``size_bytes``; without any if there is too little memory."""
        if idle.stage is not None and idle.stage.size_bytes >= size_bytes:
            return idle
        if idle.stage is not None:
            idle.stage.close()
        try:
            stage = StagingBuffer(self._stage_in, size_bytes)
        except OSError as error:
            _log.warning(
                "cannot allocate %d MiB to stage a save in %s (%s): training waits for saves; free space there, or set "
                "checkpoint.stage to a folder of a larger memory file system",
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
            deadline = time.monotonic() + _PATIENCE_S  # nobody can cancel the job while training waits
            result = try_to_write(PieceWriter(self._run), job, view, lambda: time.monotonic() > deadline, self._tries)
            if job.rank == 0 and isinstance(result, Committed):
                tidy(self._run, job)
        return SaveOutcome.of(job.meta.step, result)


def _with_writer(idle: Idle) -> Idle:
    """Return ``idle`` with a writer process that is alive and has its staging buffer."""
    if idle.writer is not None and idle.writer.alive:
        return idle
    writer = SPARE.take() or WriterProcess()
    if idle.stage is not None:
        writer.share(idle.stage.fd, idle.stage.size_bytes)
    return Idle(writer, idle.stage)
