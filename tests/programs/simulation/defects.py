"""Defects that were found and mended, to plant back: the simulation must find each of them again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

from springtide.app import resolve as resolving
from springtide.checkpoint import restore as restoring
from springtide.checkpoint.other_orders import check_order
from springtide.events import record
from springtide.on_ray.train import process_pool
from springtide.track import journal

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
    """A4: an event that cannot be written ends training."""

    def write(self: Any, event: Any) -> None:
        line = json.dumps(record(dataclasses.replace(event, term=self.term))).encode() + b"\n"
        self._open.add(line)
        self._segments.store(self._open, self._segments.wanted(self._open))

    return mock.patch.object(journal.Journal, "__call__", write)


def banned_for_ever() -> Planted:
    """A10: a node on which a worker did not come up once is never used again."""
    return mock.patch.object(process_pool, "ban_s", lambda failures: math.inf)


DEFECTS: dict[str, Callable[[], Planted]] = {
    "A1": one_reader,
    "A3": marks_before_the_claim,
    "A4": journal_on_the_path,
    "A10": banned_for_ever,
}
