"""Defects that were found and mended, to plant back: the simulation must find each of them again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

from springtide.api import resolve as resolving
from springtide.checkpoint import restore as restoring
from springtide.checkpoint.fresh_start import check_order
from springtide.elastic.forecast import RestartForecast
from springtide.events import StepDone, Stopped, listeners, record
from springtide.ray.train import hang, process_pool, snapshot_saver
from springtide.run import verify as verifying
from springtide.tracking import journal

Planted = contextlib.AbstractContextManager[Any]


def one_reader() -> Planted:
    """A1: what one rank finds bad is put in quarantine."""
    return mock.patch.object(restoring, "_confirmed", lambda *_: True)


def marks_before_the_claim() -> Planted:
    """A3: a driver that is refused has marked checkpoints before."""
    check_free = resolving.leases.check_free

    def marks_first(run: Any) -> None:
        check_order(run, lambda step: "another order", go_back=True)
        for name in restoring.committed(run)[-1:]:
            restoring.quarantine(run, name, "of another order")
        check_free(run)

    return mock.patch.object(resolving.leases, "check_free", marks_first)


def journal_on_the_path() -> Planted:
    """A4: an event that cannot be written ends training. Two things kept that from happening: the journal's own thread, and
    listeners whose OSError is logged."""

    def write(self: Any, event: Any) -> None:
        line = json.dumps(record(dataclasses.replace(event, term=self.term))).encode() + b"\n"
        self._open.add(line)
        self._segments.store(self._open, self._segments.wanted(self._open))

    def tell(self: Any, event: Any) -> None:
        if isinstance(event, StepDone | Stopped):
            self.last_step = event.step
        self.finished |= isinstance(event, Stopped) and event.status == "finished"
        for listener in self._listeners:
            listener(event)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(journal.Journal, "__call__", write))
    stack.enter_context(mock.patch.object(listeners.Listeners, "__call__", tell))
    return stack


def constant_budget() -> Planted:
    """A5: a group is asked to leave one step and a constant before the deadline."""

    def leaving_s(self: RestartForecast, reserve_s: float, durable: bool) -> float:
        return reserve_s + (self.step_s if math.isfinite(self.step_s) else 0.0)

    return mock.patch.object(RestartForecast, "leaving_s", leaving_s)


def memory_only() -> Planted:
    """A6: while nobody trains, nothing brings the state from memory to the store."""
    return mock.patch.object(snapshot_saver.SnapshotSaver, "_save", lambda self: None)


def proof_by_the_journal() -> Planted:
    """A7: what the journal lacks is not proven, though the state has a chain of it."""

    def check(self: Any, record: Any) -> None:
        while self._step < record.step:
            self._advance(None)

    return mock.patch.object(verifying._Walk, "check", check)


def banned_for_ever() -> Planted:
    """A10: a node on which a worker did not come up once is never used again."""
    return mock.patch.object(process_pool, "ban_s", lambda failures: math.inf)


def silence_is_work() -> Planted:
    """A11: before its first step, a group waits for a stopped process until the time limit."""
    return mock.patch.object(hang.Watch, "lacks", lambda *_: False)


def starts_wait() -> Planted:
    """A12: a group waits for a stopped process that starts as long as for one on a cold node."""
    return mock.patch.object(process_pool.Liveness, "gone", lambda *_: set())


DEFECTS: dict[str, Callable[[], Planted]] = {
    "A1": one_reader,
    "A3": marks_before_the_claim,
    "A4": journal_on_the_path,
    "A5": constant_budget,
    "A6": memory_only,
    "A7": proof_by_the_journal,
    "A10": banned_for_ever,
    "A11": silence_is_work,
    "A12": starts_wait,
}
