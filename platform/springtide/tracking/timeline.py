"""A journal as a timeline: its steps as arrays, every other event as an object. A million steps take seconds.

lines of a segment --pyarrow--> columns     the steps, if each is JSON with the fields and types of a step
                   --event()--> objects     other events, and all lines of a segment if pyarrow refuses one of its steps
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json

from springtide.events import Event, Started, StepDone
from springtide.events.record import FORMAT, LARGEST_INT, MOST_WORKERS

COLUMNS = (
    *("step", "tokens", "step_tokens", "world_size", "term", "updated", "memory_bytes", "loss", "grad_norm"),
    *("learning_rate",),
    *("step_time_s", "data_wait_s", "tokens_per_s", "mfu", "time_s", "energy_j", "energy_between_j"),
)
"""Fields of ``StepDone`` that are stored as arrays, one column per field."""
MOST_EXTRAS = 128
"""Most figures of ``StepDone.extra`` that are stored as a column; a run on 32 data sources has 96 figures."""
_ARROW = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_(), "StepsDone": pa.int64()}
_FIELDS = {field.name: field for field in dataclasses.fields(StepDone)}
_SCHEMA = pa.schema(
    [("kind", pa.string()), ("format", pa.int64())]
    + [(name, _ARROW[str(kind.type)]) for name, kind in _FIELDS.items() if name not in ("extra", "time_s")]
    + [("time_s", pa.float64())]
)
_WHOLE = [name for name in COLUMNS if str(_FIELDS[name].type) in ("int", "StepsDone")]
_NOT_KEPT = {"loss_scale": 1.0, "digest": ""}
"""Fields of ``StepDone`` without a column -> their value in an event that is made from columns."""
_LATEST_S = 1e11
"""Largest valid ``Event.time_s``, in seconds since 1970."""


@dataclasses.dataclass(frozen=True)
class StepColumns:
    """Step events as columns: arrays (T,) of float64, with one value per step."""

    columns: Mapping[str, np.ndarray]
    """Field name (one of ``COLUMNS``) -> array of its values."""
    extra: Mapping[str, np.ndarray]
    """Name of a figure of ``StepDone.extra`` -> array; NaN at steps without the figure."""

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def take(self, which: np.ndarray | slice) -> StepColumns:
        """Return the steps at the rows ``which``, indices or a slice."""
        extra = {name: column[which] for name, column in self.extra.items()}
        return StepColumns({name: column[which] for name, column in self.columns.items()}, extra)


def joined(parts: Sequence[StepColumns]) -> StepColumns:
    """Return the steps of all ``parts`` as one table, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    names = list(dict.fromkeys(name for part in parts for name in part.extra))[:MOST_EXTRAS]
    columns = {name: _concatenated([part[name] for part in parts]) for name in COLUMNS}
    unknown = [np.full(len(part), np.nan) for part in parts] if names else []
    extra = {
        name: _concatenated([part.extra.get(name, none) for part, none in zip(parts, unknown, strict=True)])
        for name in names
    }
    return StepColumns(columns, extra)


def _concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0)


def columns_of(steps: Sequence[StepDone]) -> StepColumns:
    """Return the columns of step events."""
    columns = {name: np.array([getattr(step, name) for step in steps], np.float64) for name in COLUMNS}
    names = list(dict.fromkeys(name for step in steps for name in step.extra))[:MOST_EXTRAS]
    extra = {name: np.array([step.extra.get(name, math.nan) for step in steps], np.float64) for name in names}
    return StepColumns(columns, extra)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """All events of a run: steps as arrays, other events as objects."""

    tries: StepColumns
    """Every try (execution) of every step, including steps that were later repeated, in the order of writing."""
    placed: Sequence[tuple[int, Event]]
    """(number of rows of ``tries`` before the event, event) of every event that is not a step."""
    unknown: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Kind of event that this version does not know -> number of such events, which are skipped."""

    @functools.cached_property
    def events(self) -> list[Event]:
        """The events that are not steps, in the order of writing."""
        return [event for _, event in self.placed]

    @functools.cached_property
    def steps(self) -> StepColumns:
        """The steps of the run's current model, each once and in order. If a worker group starts again from an earlier step,
        executions of steps beyond it before that start are dropped. If a step still has several executions, the last one is
        kept."""
        numbers = self.tries["step"]
        kept = np.flatnonzero(numbers <= self._lowest_later_start())
        if len(kept) == len(numbers) and (np.diff(numbers) > 0).all():
            return self.tries
        _, last = np.unique(numbers[kept][::-1], return_index=True)
        return self.tries.take(kept[len(kept) - 1 - last])

    @property
    def last_try(self) -> int:
        """The highest step that was ever trained, even if the run has since restarted from an earlier step; 0 without steps."""
        return int(self.tries["step"].max(initial=0))

    def _lowest_later_start(self) -> np.ndarray:
        """Return, for each row of ``tries``, the lowest step at which a worker group started after it; infinite if none did."""
        found = np.full(len(self.tries), np.inf)
        for at, event in self.placed:
            if at and isinstance(event, Started):
                found[at - 1] = min(found[at - 1], event.step)
        return np.minimum.accumulate(found[::-1])[::-1]

    def spans(self) -> tuple[float, float]:
        """Return the times of the first and the last event [seconds since 1970]; (0, 0) if there are no events."""
        times = [event.time_s for event in self.events]
        times += [float(self.tries["time_s"][at]) for at in ((0, -1) if len(self.tries) else ())]
        return (min(times), max(times)) if times else (0.0, 0.0)

    def condensed(self, whole: int = 0, newest: int = 0) -> list[Event]:
        """Return a much shorter list of events that gives the same ledger. Steps in a row, without another event in between,
        are merged into one ``StepDone`` with the sums of their times, tokens, joules and ``extra`` figures. A step whose update
        was skipped is not merged.

        Args:
            whole: number of the newest steps to keep unmerged.
            newest: greatest step trained before this part of a journal; steps up to it count as trained again.
        """
        term, time_s = self.tries["term"], self.tries["time_s"]
        order = np.lexsort((time_s, term)) if (np.diff(term) < 0).any() or (np.diff(time_s) < 0).any() else None
        rows = self.tries if order is None else self.tries.take(order)
        ends = _cuts(rows, self.events, whole, newest)
        written = ends - 1 if order is None else order[ends - 1]
        # sort key for events of equal time: the order of writing; + 0.5 puts a step after the events written before it
        found: list[tuple[float, Event]] = [(float(at), event) for at, event in self.placed]
        found += [(at + 0.5, event) for at, event in zip(written.tolist(), _merged(rows, ends), strict=True)]
        return [event for _, event in sorted(found, key=lambda one: (one[1].term, one[1].time_s, one[0]))]


def timeline_of(events: Iterable[Event]) -> Timeline:
    """Return ``events``, in the order of writing, as a timeline."""
    steps: list[StepDone] = []
    placed: list[tuple[int, Event]] = []
    for event in events:
        if isinstance(event, StepDone):
            steps.append(event)
        else:
            placed.append((len(steps), event))
    return Timeline(columns_of(steps), placed)


def _cuts(rows: StepColumns, events: Sequence[Event], whole: int, newest: int) -> np.ndarray:
    """Split steps into parts that can each be merged into one step event without changing the ledger (time by kind). Returns
    the end index of each part. ``rows``: steps in order of term and time."""
    if not len(rows):
        return np.empty(0, np.int64)
    term, time_s, step = rows["term"], rows["time_s"], rows["step"]
    keys = np.array([(event.term, event.time_s) for event in events]).reshape(-1, 2)
    at = [np.flatnonzero(np.diff(term)) + 1]
    for one in np.unique(keys[:, 0]) if len(keys) else ():
        begin, end = np.searchsorted(term, (one, one + 1))
        times = keys[keys[:, 0] == one, 1]
        for side in ("left", "right"):  # an event may be before or after a step of the same time
            at.append(begin + np.searchsorted(time_s[begin:end], times, side))
    is_new = step > np.maximum.accumulate(np.concatenate([[newest], step[:-1]]))
    at.append(np.flatnonzero(np.diff(is_new)) + 1)
    at.append(np.arange(max(0, len(rows) - whole), len(rows)))
    skipped = np.flatnonzero(rows["updated"] == 0)
    at += [skipped, skipped + 1]
    begins = np.unique(np.concatenate([[0], *at]))
    # the first step after an event that is not a step is not merged: the ledger measures a gap from its times
    return np.unique(np.concatenate([begins, begins + 1, [len(rows)]]).clip(1, len(rows)))


def _merged(rows: StepColumns, ends: np.ndarray) -> Iterator[StepDone]:
    """Yield one merged step event for each part of the steps ``rows``. ``ends``: the index after the last row of each part."""
    if not len(ends):
        return
    begins = np.concatenate([[0], ends[:-1]])
    passed = np.diff(rows["time_s"], prepend=rows["time_s"][:1])
    alone = begins[ends - begins == 1]
    passed[alone] = np.inf  # a step that stays alone keeps its own times
    step_time_s = np.minimum(rows["step_time_s"], passed.clip(0))
    wait_s = np.minimum(rows["data_wait_s"], step_time_s)
    sums = {
        "step_time_s": np.add.reduceat(step_time_s, begins),
        "data_wait_s": np.add.reduceat(wait_s, begins),
        "step_tokens": np.add.reduceat(rows["step_tokens"], begins),
        "energy_j": np.add.reduceat(_counted(rows["energy_j"]), begins),
        "energy_between_j": np.add.reduceat(
            np.minimum(*map(_counted, (rows["energy_between_j"], rows["energy_j"]))), begins
        ),
    }
    columns = {name: sums.get(name, column[ends - 1]) for name, column in rows.columns.items()}
    extra = {name: np.add.reduceat(np.nan_to_num(column), begins) for name, column in rows.extra.items()}
    figures = zip(*(column.tolist() for column in extra.values()), strict=True) if extra else itertools.repeat(())
    values = zip(*(_typed(name, column).tolist() for name, column in columns.items()), strict=True)
    for row, of_extra in zip(values, figures, strict=False):
        # skip the constructor for speed: a frozen dataclass sets each field by a call, and a run with 10,000 restarts has
        # 40,000 merged events
        one = object.__new__(StepDone)
        one.__dict__.update(zip(columns, row, strict=True), extra=dict(zip(extra, of_extra, strict=True)))
        one.__dict__.update(_NOT_KEPT)
        yield one


def _typed(name: str, column: np.ndarray) -> np.ndarray:
    """Return the column of the field ``name``, converted from float64 to the type of the field in ``StepDone``."""
    types = {"bool": np.bool_, "int": np.int64, "StepsDone": np.int64}
    return column.astype(types.get(str(_FIELDS[name].type), np.float64))


def _counted(joules: np.ndarray) -> np.ndarray:
    """Return energies [J] with 0 in place of invalid values (not finite, or negative), which the ledger ignores."""
    return np.where(np.isfinite(joules) & (joules > 0), joules, 0.0)


def _are_taken(columns: Mapping[str, np.ndarray]) -> bool:
    """Return True if all times and whole numbers in ``columns`` are within the limits that the parser ``event`` accepts."""
    limits: dict[str, tuple[float, float]] = dict.fromkeys(_WHOLE, (1 - LARGEST_INT, LARGEST_INT - 1))
    limits |= {"time_s": (0, _LATEST_S), "world_size": (0, MOST_WORKERS)}
    return all(
        bool(((columns[name] >= least) & (columns[name] <= most)).all())
        for name, (least, most) in limits.items()
        if name in columns
    )


def parse_steps(lines: Sequence[bytes]) -> StepColumns | None:
    """Parse journal lines of steps into columns. Returns None if a line differs from what a run writes; then the slower
    ``event`` must parse each line.

    Args:
        lines: JSON without newlines; each contains ``"kind": "step"``.
    """
    if not lines:
        return columns_of([])
    options = pyarrow.json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="infer")
    text = b"\n".join(lines)
    data = pa.py_buffer(text)
    try:
        text.decode()  # raises for bytes that are not UTF-8, which pyarrow accepts
        # read one block, so that pyarrow infers the types of figures in ``extra`` from all lines
        reading = pyarrow.json.ReadOptions(use_threads=False, block_size=data.size + 1)
        table = pyarrow.json.read_json(data, reading, options)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OverflowError, UnicodeDecodeError):
        return None
    if table.num_rows != len(lines) or not set(table.column_names) <= {*_SCHEMA.names, "extra"}:
        return None
    return _checked(table, text)


def _checked(table: pa.Table, lines: bytes) -> StepColumns | None:
    """Return the columns of a table of steps parsed by pyarrow; None if the stricter parser ``event`` might refuse a value.
    ``lines``: the text that was parsed."""
    columns = dict[str, np.ndarray]()
    for name in _SCHEMA.names:
        column = table[name].combine_chunks()
        if column.null_count:
            default = _value_of_nulls(name, column, lines)
            if default is dataclasses.MISSING:
                return None
            column = column.fill_null(default)
        if name in ("kind", "format") and column.unique().to_pylist() != [{"kind": "step", "format": FORMAT}[name]]:
            return None
        if column.type != pa.string():
            columns[name] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if not _are_taken(columns):
        return None
    found: dict[str, np.ndarray] = {}
    if "extra" in table.column_names:
        extra = table["extra"].combine_chunks()
        if not pa.types.is_struct(extra.type) or extra.null_count != len(extra) - lines.count(b'"extra"'):
            return None
        for field, column in zip(extra.type, extra.flatten(), strict=True):
            if field.type not in (pa.int64(), pa.float64(), pa.null()):
                return None
            found[field.name] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if any(np.isinf(column).any() for column in (*columns.values(), *found.values())):
        return None  # let ``event`` decide: it accepts 1e999, but not a whole number of 400 digits
    return StepColumns({name: columns[name] for name in COLUMNS}, dict(list(found.items())[:MOST_EXTRAS]))


def _value_of_nulls(name: str, column: pa.Array, lines: bytes) -> Any:
    """Return the value that the parser ``event`` gives to a field that is null or missing in some lines. If the field is null
    in all these lines: NaN. If it is missing in all of them: the field's default. Otherwise ``dataclasses.MISSING``, because
    ``event`` may refuse a line.
    """
    if column.type == pa.float64() and lines.count(f'"{name}": null'.encode()) == column.null_count:
        return math.nan  # for ``time_s``, ``_are_taken`` then refuses the NaN
    if lines.count(f'"{name}"'.encode()) + column.null_count != len(column):
        return dataclasses.MISSING
    return FORMAT if name == "format" else getattr(_FIELDS.get(name), "default", dataclasses.MISSING)
