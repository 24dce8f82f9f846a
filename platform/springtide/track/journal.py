"""The journal: every event of a run, append-only, one JSON object a line. All other reports are made from it.

    <run>/journal/0002-0000.jsonl     the first segment that the second start of the driver wrote

A start never touches another's segments, so a torn line can only be a segment's last and is left out when read.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, Self

from springtide.store import Folder
from springtide.track.events import Event, StepDone, event, record

_SEGMENT = re.compile(r"(\d{4})-(\d{4})\.jsonl")
_SEGMENT_LINES = 10_000
_FLUSH_S = 10.0


class Journal:
    """A listener that writes. On a local disk every event is with the system at once; an object store cannot append, so
    there the open segment is put again every ten seconds and at every event that is not a step."""

    def __init__(self, run: Folder, enabled: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """``enabled`` is false on ranks that do not write."""
        self._folder, self._enabled, self._clock = run / "journal", enabled, clock
        segments = [match for name in self._folder.names() if (match := _SEGMENT.fullmatch(name))] if enabled else []
        self.attempt = 1 + max((int(match[1]) for match in segments), default=0)
        self._segment = -1
        self._lines: list[str] = []
        self._flushed_at = clock()
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Write one event, stamped with this attempt."""
        if not self._enabled:
            return
        if self._segment < 0 or len(self._lines) >= _SEGMENT_LINES:
            self._next_segment()
        self._lines.append(json.dumps(record(dataclasses.replace(event, attempt=self.attempt))))
        if self._file is not None:
            self._file.write(self._lines[-1] + "\n")
            self._file.flush()
        elif not isinstance(event, StepDone) or self._clock() - self._flushed_at > _FLUSH_S:
            self._put()

    def close(self) -> None:
        """Make what was written last."""
        if self._file is not None:
            self._file.close()
        elif self._lines:
            self._put()

    def _next_segment(self) -> None:
        self.close()
        self._segment += 1
        self._lines = []
        if self._folder.is_local:
            self._folder.write(self._name, b"")
            self._file = open(self._folder.where(self._name), "a", encoding="utf-8")  # noqa: SIM115

    @property
    def _name(self) -> str:
        return f"{self.attempt:04d}-{self._segment:04d}.jsonl"

    def _put(self) -> None:
        self._folder.write(self._name, "\n".join(self._lines) + "\n")
        self._flushed_at = self._clock()


def read_journal(run: Folder) -> list[Event]:
    """Every event of a run, in the order it was written; a line cut short by a kill is left out."""
    return list(_events(run / "journal"))


def _events(folder: Folder) -> Iterator[Event]:
    for name in filter(_SEGMENT.fullmatch, folder.names()):
        lines = folder.read(name).decode().split("\n")
        # what follows the last newline is empty, or was being written when the writer died
        for line in lines[:-1]:
            yield event(json.loads(line))


def last_steps(events: list[Event]) -> list[StepDone]:
    """One event a step, the last that was trained where a step was trained twice, in order of steps."""
    steps: dict[int, StepDone] = {one.step: one for one in events if isinstance(one, StepDone)}
    return [steps[step] for step in sorted(steps)]


def frame(events: list[Event]) -> Any:
    """The steps of ``last_steps`` as a pandas DataFrame, indexed by step."""
    import pandas as pd  # a notebook's need, not the loop's

    steps = [dataclasses.asdict(one) for one in last_steps(events)]
    return pd.DataFrame(steps).set_index("step") if steps else pd.DataFrame()
