"""Checkpoints of a training loop of your own: saved while training continues, verified and resharded when they are loaded."""

from __future__ import annotations

import secrets
import time
from typing import Self

import torch
from torch import nn

from springtide.checkpoint import leases
from springtide.checkpoint.async_saver import AsyncSaver
from springtide.checkpoint.format import Meta, committed, step_of
from springtide.checkpoint.restore import restore
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.tensors import named_tensors
from springtide.config.steps import StepsDone
from springtide.distributed import gathered, on_first, rank_here
from springtide.errors import CheckpointError
from springtide.storage import Folder

_TRIES = 3


class Checkpointer:
    """The checkpoints in one folder. Every rank of the default process group has one and calls each method; one process
    needs no process group. As a context manager it closes itself: it waits for the last save, after an error it does not.

    Tensors may be FSDP2 shards, HSDP or whole: what one layout and number of ranks saved, any other restores. A checkpoint
    counts once every rank's part is in the store; a killed save leaves the older ones as they were.

    Args:
        folder: Folder or URL (``s3://``, ``gs://``, ``az://``) that all ranks reach.
        keep_last: Number of checkpoints to keep.
        stage_in: Folder of a memory file system; a save blocks only for the copy into it. Empty: a save blocks until it is
            written.

    Raises:
        RunExists: a live process of this machine writes the folder.

    Examples:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> with st.checkpoint.Checkpointer("mine") as checkpoints:
        ...     step = checkpoints.restore(model, optimizer)
        ...     checkpoints.save(step + 10, model, optimizer)
        >>> with st.checkpoint.Checkpointer("mine") as checkpoints:
        ...     checkpoints.restore(model, optimizer)
        10
    """

    def __init__(self, folder: str, *, keep_last: int = 3, stage_in: str = "/dev/shm") -> None:
        self._run = Folder(folder)
        owner = secrets.token_hex(8)
        term = on_first(lambda: leases.claim(self._run, owner).term)
        self._term, self._rank, self._size = term, rank_here(), len(gathered(None))
        self._newest: int | None = None
        """The step that was restored or saved last; None: nothing was yet."""
        self._saver = AsyncSaver(
            self._run,
            term,
            self._rank,
            self._size,
            stage_in=stage_in,
            tries=_TRIES,
            rule=Rule(keep_last),
            owner=owner,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)  # after an error the other ranks may be elsewhere

    def close(self, *, wait: bool = True) -> None:
        """Release the folder.

        Args:
            wait: Whether to wait for the last save, on every rank. Without, a save under way may not count.

        Raises:
            CheckpointError: the last save failed on some rank.
        """
        try:
            if wait:
                self.wait()
                self._saver.end()
        finally:
            self._saver.close()
            if self._rank == 0:
                leases.end(self._run, self._term)

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest good checkpoint in place.

        Args:
            model: of the same parameters as the one saved, in any layout.
            optimizer: of that model; its state is created if it has not stepped.

        Returns:
            The steps done when it was saved; 0 if there is none yet.

        Raises:
            CheckpointError: the newest is of another model, or bytes of the last one are bad.
        """
        found = restore(self._run, model, optimizer, lambda _: "", term=self._term)
        self._newest = found.meta.step if found else 0
        return self._newest

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Save the state, after at least one step of the optimizer; returns when it is copied, and the model may change.

        Args:
            step: steps done.
            model: what is saved, with its buffers.
            optimizer: of that model. Its state is saved, its hyperparameters are not.

        Raises:
            CheckpointError: the save before failed on some rank, or the folder holds later steps: of the loop before, whose
                state was not restored, or saved here.
        """
        self.wait()
        if self._newest is None:  # nobody has looked
            self._newest = max((step_of(name) or 0 for name in on_first(lambda: committed(self._run))), default=-1)
            is_taken = step <= self._newest
        else:
            is_taken = step < self._newest
        if is_taken:
            raise CheckpointError(
                f"{self._run.url} holds step {self._newest}, and {step} is no later one: it would not count; call restore "
                "first, or name another folder"
            )
        self._newest = step
        meta = Meta(
            step=StepsDone(step),
            tokens=0,
            world_size=self._size,
            order_identity="",
            config_fingerprint="",
            saved_s=time.time(),
        )
        self._saver.begin(named_tensors(model, optimizer), meta, {})
        self._saver.staged()

    def wait(self) -> None:
        """Wait until the last save counts. Raises CheckpointError, on every rank, if it failed on some rank."""
        if not self._saver.busy:
            return
        # rank 0 commits when all parts are there: it must not wait for one that failed
        error = self._outcome() if self._rank else None
        if any(gathered(error)) and not self._rank:
            self._saver.cancel()
        problems = gathered(error if self._rank else self._outcome())
        if reasons := [f"{problem} (rank {rank})" for rank, problem in enumerate(problems) if problem]:
            raise CheckpointError(f"the save in {self._run.url} failed: {'; '.join(reasons)}")

    def _outcome(self) -> str:
        """Wait for this rank's part; returns why it failed, or an empty text."""
        outcome = self._saver.poll(wait=True)
        return "" if outcome is None or outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
