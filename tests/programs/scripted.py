"""A writer process that answers and dies when told, and copies that take as long as told: for tests of every transition."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from springtide.checkpoint import async_saver, staging
from springtide.checkpoint.async_saver import SPARE
from springtide.checkpoint.commit import CommitJob


class ScriptedWriter:
    """As the saver sees a ``WriterProcess``."""

    started: ClassVar[list[ScriptedWriter]] = []
    """All of them, in the order of their start."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.answers: list[Any] = []
        self.alive = True
        self.waited_s: float | None = None
        """How long ``close`` was told to wait; None before."""
        self.started.append(self)

    def share(self, fd: int, size_bytes: int) -> None:
        self.heard.append("stage")

    def save(self, job: CommitJob, tries: int) -> None:
        self.heard.append(job.meta.step)

    def cancel(self, step: int) -> None:
        self.heard.append(f"cancel {step}")

    def release(self) -> None:
        self.heard.append("release")

    def answered(self) -> bool:
        return bool(self.answers) or not self.alive

    def answer(self) -> Any:
        if not self.alive:
            raise OSError("the writer process ended with status -9")
        return self.answers.pop(0)

    def close(self, wait_s: float = 0.0) -> None:
        self.waited_s = wait_s


class Copies:
    """The copies to staging buffers: each waits until ``may_end`` is set, and raises ``error`` if there is one."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.error: Exception | None = None

    def __call__(self, pairs: Any) -> None:
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error


@contextmanager
def scripted() -> Iterator[Copies]:
    """In the block, savers start scripted writers and make no copies; no writer from before is the spare one, nor one from
    the block afterwards."""
    copies = Copies()
    with pytest.MonkeyPatch.context() as patch:
        SPARE.close()
        patch.setattr(ScriptedWriter, "started", [])
        patch.setattr(async_saver, "WriterProcess", ScriptedWriter)
        patch.setattr(staging, "_copy", copies)
        yield copies
        copies.may_end.set()
        SPARE.close()
