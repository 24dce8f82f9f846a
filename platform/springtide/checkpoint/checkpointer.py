"""Checkpoints for your own training loop: saved while training continues, verified and resharded when they are loaded."""

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
    """Saves and restores the checkpoints in one folder.

    Every rank of the default process group creates a Checkpointer and calls each method; a single process needs no process
    group. Use it as a context manager: on exit it waits for the last save, except after an error.

    The model may use FSDP2, HSDP or neither. A checkpoint can be restored with any other layout and number of ranks. A
    checkpoint can be restored once every rank's part is in the store. If a save is killed, older checkpoints stay unchanged.

    Args:
        folder: Folder or URL (``s3://``, ``gs://``, ``az://``) that all ranks reach.
        keep_last: Number of checkpoints to keep.
        stage_in: Folder of a memory file system, into which a save first copies the state. The save blocks only for this copy.
            If empty, a save blocks until the state is written.

    Raises:
        RunExists: another live process of this machine writes to the folder.

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
        """The step that was last restored or saved; None before the first restore or save."""
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
        self.close(wait=kind is None)  # after an error other ranks may not reach this call, and a wait would hang

    def close(self, *, wait: bool = True) -> None:
        """Release the folder, so that another process may write it.

        Args:
            wait: Wait for the last save; pass the same value on every rank. If False, a save in progress may not be committed.

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
        """Load the newest checkpoint that is not damaged into ``model`` and ``optimizer``.

        Args:
            model: has the same parameters as the saved model, in any layout.
            optimizer: optimizer of ``model``; its state is created if it has not stepped.

        Returns:
            Number of steps done when the checkpoint was saved; 0 if there is no checkpoint yet.

        Raises:
            CheckpointError: the newest checkpoint is of another model, or the only checkpoint that is left is damaged.
        """
        found = restore(self._run, model, optimizer, lambda _: "", term=self._term)
        self._newest = found.meta.step if found else 0
        return self._newest

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Save the state. Returns when the state is copied and the model may change. Waits for the previous save first.

        Args:
            step: number of steps done.
            model: its parameters and persistent buffers are saved.
            optimizer: optimizer of ``model``; it must have stepped. Its state is saved, its hyperparameters are not.

        Raises:
            CheckpointError: the previous save failed on some rank; the folder contains a checkpoint of a later step; or it
                contains a checkpoint of ``step``, and this Checkpointer has neither restored nor saved before.
        """
        self.wait()
        if self._newest is None:  # neither restored nor saved yet: look for checkpoints of an earlier loop
            self._newest = max((step_of(name) or 0 for name in on_first(lambda: committed(self._run))), default=-1)
            is_taken = step <= self._newest
        else:
            is_taken = step < self._newest
        if is_taken:
            raise CheckpointError(
                f"{self._run.url} holds step {self._newest}, and {step} is no later one: restores would ignore the save; call "
                "restore first, or name another folder"
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
        """Wait until the last save is committed. Raises CheckpointError, on every rank, if the save failed on some rank."""
        if not self._saver.busy:
            return
        # rank 0 waits for the files of all ranks before it commits: cancel that wait if another rank could not write its file
        error = self._outcome() if self._rank else None
        if any(gathered(error)) and not self._rank:
            self._saver.cancel()
        problems = gathered(error if self._rank else self._outcome())
        if reasons := [f"{problem} (rank {rank})" for rank, problem in enumerate(problems) if problem]:
            raise CheckpointError(f"the save in {self._run.url} failed: {'; '.join(reasons)}")

    def _outcome(self) -> str:
        """Wait until this rank's part is written. Returns an empty text, or the error if the write failed."""
        outcome = self._saver.poll(wait=True)
        return "" if outcome is None or outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
