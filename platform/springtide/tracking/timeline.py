"""A run's journal as a timeline: its steps as arrays, every other event as an object. A million steps take seconds to read.

lines of a segment --pyarrow--> columns     steps, if pyarrow can read all steps of the segment (a file of the journal)
                   --event()--> objects     other events; and all lines, if pyarrow refuses one of the segment's steps
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
"""Most figures (metrics) of ``StepDone.extra`` that are stored, one column each. A run on 32 data sources has 96 figures."""
_ARROW = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_(), "StepsDone": pa.int64()}
_FIELDS = {field.name: field for field in dataclasses.fields(StepDone)}
_SCHEMA = pa.schema(
    [("kind", pa.string()), ("format", pa.int64())]
    + [(name, _ARROW[str(kind.type)]) for name, kind in _FIELDS.items() if name not in ("extra", "time_s")]
    + [("time_s", pa.float64())]
)
_WHOLE = [name for name in COLUMNS if str(_FIELDS[name].type) in ("int", "StepsDone")]
_NOT_KEPT = {"loss_scale": 1.0, "digest": ""}
"""Fields of ``StepDone`` that have no column -> the value that they get when an event is made from the columns."""
_LATEST_S = 1e11
"""Largest valid time of an event, in seconds since 1970 (the year 5138)."""


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
        """Return a table of only the rows ``which``: an array of indexes or booleans, or a slice."""
        extra = {name: column[which] for name, column in self.extra.items()}
        return StepColumns({name: column[which] for name, column in self.columns.items()}, extra)


def joined(parts: Sequence[StepColumns]) -> StepColumns:
    """Return one table with the rows of all ``parts``, one part after another. A missing ``extra`` figure becomes NaN."""
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
    """Return a table of step events: each field as an array with one value per step."""
    columns = {name: np.array([getattr(step, name) for step in steps], np.float64) for name in COLUMNS}
    names = list(dict.fromkeys(name for step in steps for name in step.extra))[:MOST_EXTRAS]
    extra = {name: np.array([step.extra.get(name, math.nan) for step in steps], np.float64) for name in names}
    return StepColumns(columns, extra)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """All events of a run: steps as arrays, other events as objects."""

    tries: StepColumns
    """Every execution (try) of every step, in the order of writing. A step that was trained again has several."""
    placed: Sequence[tuple[int, Event]]
    """(number of rows of ``tries`` written before the event, event) of every event that is not a step."""
    unknown: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Kind of event that this version does not know -> number of such events, which are skipped."""

    @functools.cached_property
    def events(self) -> list[Event]:
        """The events that are not steps, in the order of writing."""
        return [event for _, event in self.placed]

    @functools.cached_property
    def steps(self) -> StepColumns:
        """The steps that the current model was trained on, each once, in ascending order. If a worker group started again from
        step s, earlier executions of steps after s are dropped. Of several executions that remain, the last one is kept."""
        numbers = self.tries["step"]
        kept = np.flatnonzero(numbers <= self._lowest_later_start())
        if len(kept) == len(numbers) and (np.diff(numbers) > 0).all():
            return self.tries
        _, last = np.unique(numbers[kept][::-1], return_index=True)
        return self.tries.take(kept[len(kept) - 1 - last])

    @property
    def last_try(self) -> int:
        """The highest step that was ever trained, even if the run has since gone back to an earlier step; 0 without steps."""
        return int(self.tries["step"].max(initial=0))

    def _lowest_later_start(self) -> np.ndarray:
        """Return, for each row of ``tries``, the lowest step from which a worker group started after that row was written;
        infinite if none started."""
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
        """Return a much shorter list of events that gives the same ledger (time by category). Consecutive steps without another
        event between them are merged into one ``StepDone``, which has the sums of their times, tokens, joules and ``extra``
        figures. A step whose weight update was skipped is not merged.

        Args:
            whole: number of newest steps that are not merged.
            newest: highest step trained before the first event of this timeline; steps up to it count as trained again.
        """
        term, time_s = self.tries["term"], self.tries["time_s"]
        order = np.lexsort((time_s, term)) if (np.diff(term) < 0).any() or (np.diff(time_s) < 0).any() else None
        rows = self.tries if order is None else self.tries.take(order)
        ends = _cuts(rows, self.events, whole, newest)
        written = ends - 1 if order is None else order[ends - 1]
        # events of equal time keep the order of writing: a step in row r gets the key r + 0.5, any other event the number of
        # steps that were written before it
        found: list[tuple[float, Event]] = [(float(at), event) for at, event in self.placed]
        found += [(at + 0.5, event) for at, event in zip(written.tolist(), _merged(rows, ends), strict=True)]
        return [event for _, event in sorted(found, key=lambda one: (one[1].term, one[1].time_s, one[0]))]


def timeline_of(events: Iterable[Event]) -> Timeline:
    """Return a timeline of ``events``, which must be in the order of writing."""
    steps: list[StepDone] = []
    placed: list[tuple[int, Event]] = []
    for event in events:
        if isinstance(event, StepDone):
            steps.append(event)
        else:
            placed.append((len(steps), event))
    return Timeline(columns_of(steps), placed)


def _cuts(rows: StepColumns, events: Sequence[Event], whole: int, newest: int) -> np.ndarray:
    """Split consecutive steps into parts, so that merging each part into one event does not change the ledger (time by
    category). Returns the index after the last row of each part. ``rows``: steps, sorted by driver (term) and time."""
    if not len(rows):
        return np.empty(0, np.int64)
    term, time_s, step = rows["term"], rows["time_s"], rows["step"]
    keys = np.array([(event.term, event.time_s) for event in events]).reshape(-1, 2)
    at = [np.flatnonzero(np.diff(term)) + 1]
    for one in np.unique(keys[:, 0]) if len(keys) else ():
        begin, end = np.searchsorted(term, (one, one + 1))
        times = keys[keys[:, 0] == one, 1]
        for side in ("left", "right"):  # steps at the event's exact time may be before or after it: cut on both sides
            at.append(begin + np.searchsorted(time_s[begin:end], times, side))
    is_new = step > np.maximum.accumulate(np.concatenate([[newest], step[:-1]]))
    at.append(np.flatnonzero(np.diff(is_new)) + 1)
    at.append(np.arange(max(0, len(rows) - whole), len(rows)))
    skipped = np.flatnonzero(rows["updated"] == 0)
    at += [skipped, skipped + 1]
    begins = np.unique(np.concatenate([[0], *at]))
    # do not merge the first step after another event: after a restart, the ledger computes the gap from this step's times
    return np.unique(np.concatenate([begins, begins + 1, [len(rows)]]).clip(1, len(rows)))


def _merged(rows: StepColumns, ends: np.ndarray) -> Iterator[StepDone]:
    """Yield one merged step event for each part of the steps in ``rows``. ``ends``: index after the last row of each part."""
    if not len(ends):
        return
    begins = np.concatenate([[0], ends[:-1]])
    passed = np.diff(rows["time_s"], prepend=rows["time_s"][:1])
    alone = begins[ends - begins == 1]
    passed[alone] = np.inf  # a step that is not merged keeps its own times
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
        # skip the slow constructor: a frozen dataclass calls a function per field, and a run with 10,000 restarts has 40,000
        # merged events
        one = object.__new__(StepDone)
        one.__dict__.update(zip(columns, row, strict=True), extra=dict(zip(extra, of_extra, strict=True)))
        one.__dict__.update(_NOT_KEPT)
        yield one


def _typed(name: str, column: np.ndarray) -> np.ndarray:
    """Return the column of the field ``name``, converted from float64 to the type of the field in ``StepDone``."""
    types = {"bool": np.bool_, "int": np.int64, "StepsDone": np.int64}
    return column.astype(types.get(str(_FIELDS[name].type), np.float64))


def _counted(joules: np.ndarray) -> np.ndarray:
    """Return energies [J], with 0 for each value that the ledger ignores: infinite, NaN or negative."""
    return np.where(np.isfinite(joules) & (joules > 0), joules, 0.0)


def _are_taken(columns: Mapping[str, np.ndarray]) -> bool:
    """Return True if all times and whole numbers in ``columns`` are within the limits of ``events.record.event``, the parser of
    single events."""
    limits: dict[str, tuple[float, float]] = dict.fromkeys(_WHOLE, (1 - LARGEST_INT, LARGEST_INT - 1))
    limits |= {"time_s": (0, _LATEST_S), "world_size": (0, MOST_WORKERS)}
    return all(
        bool(((columns[name] >= least) & (columns[name] <= most)).all())
        for name, (least, most) in limits.items()
        if name in columns
    )


def parse_steps(lines: Sequence[bytes]) -> StepColumns | None:
    """Parse journal lines of steps into columns with pyarrow. Returns None if a line differs from the lines that a run writes:
    the caller must then parse each line with the slower function ``event``.

    Args:
        lines: JSON without newlines; each contains ``"kind": "step"``.
    """
    if not lines:
        return columns_of([])
    options = pyarrow.json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="infer")
    text = b"\n".join(lines)
    data = pa.py_buffer(text)
    try:
        text.decode()  # raises if the bytes are not UTF-8: pyarrow would accept them, and ``event`` does not
        # read the text as one block, so that pyarrow infers the types of the figures in ``extra`` from all lines
        reading = pyarrow.json.ReadOptions(use_threads=False, block_size=data.size + 1)
        table = pyarrow.json.read_json(data, reading, options)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OverflowError, UnicodeDecodeError):
        return None
    if table.num_rows != len(lines) or not set(table.column_names) <= {*_SCHEMA.names, "extra"}:
        return None
    return _checked(table, text)


def _checked(table: pa.Table, lines: bytes) -> StepColumns | None:
    """Return the columns of ``table``, steps that pyarrow has parsed. Returns None if the stricter parser ``event`` might
    refuse a value. ``lines``: the text that pyarrow has parsed."""
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
        return None  # let ``event`` decide: it accepts 1e999, but no whole number of 400 digits
    return StepColumns({name: columns[name] for name in COLUMNS}, dict(list(found.items())[:MOST_EXTRAS]))


def _value_of_nulls(name: str, column: pa.Array, lines: bytes) -> Any:
    """Return the value with which to replace the nulls in the column of the field ``name``. It is the value that the parser
    ``event`` would use.

    pyarrow reads a null where a line's field is null or missing. If a float field is null in all lines with a null, the value
    is NaN. If the field is missing in all of them, the value is the field's default. Otherwise ``dataclasses.MISSING`` is
    returned, because ``event`` may refuse a line.
    """
    if column.type == pa.float64() and lines.count(f'"{name}": null'.encode()) == column.null_count:
        return math.nan  # a NaN in ``time_s`` is refused later, by ``_are_taken``
    if lines.count(f'"{name}"'.encode()) + column.null_count != len(column):
        return dataclasses.MISSING
    return FORMAT if name == "format" else getattr(_FIELDS.get(name), "default", dataclasses.MISSING)
