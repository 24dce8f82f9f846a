"""Reads the lines of steps as a run writes them: columns of numbers cut out of the bytes, without parsing JSON.

A run writes every step with the same keys in the same order, so the text between values is known from one line, the pattern:

    {"format": 1, "kind": "step", "time_s": 1.5, "term": 1, ..., "extra": {"loss/code": 2.0}}
    text-------------------------------------^ value  text--^ value ...                   ^ text

Commas tell where values end. What lies between values is compared with the pattern, byte by byte, and a value must be a number
as JSON writes it. A line that fails this is for ``timeline.parse_steps`` or ``event`` to judge: this reader refuses, and never
repairs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from springtide.events import StepDone
from springtide.events.record import LARGEST_INT, event

STEP = b'"kind": "step"'
"""What a step's line has; where text says so, its quotes are escaped."""
_MOST_PATTERNS = 16
"""The most patterns in one piece of a journal: a figure that only some steps tell makes another pattern."""
_ROWS_COMPARED = 8192
"""Lines that are compared with a pattern at a time: the pattern is kept this many times in a row."""
_MOST_BYTES = 2**31 - 2**20
"""pyarrow's offsets are 32-bit."""
_LINE, _COMMA, _MINUS, _ZERO, _NULL = b"\n,-0n"
_KINDS = {"int": "int", "StepsDone": "int", "float": "float", "str": "hex"}
_POINT_E = tuple(int.from_bytes(word, "little") for word in (b".e", b".E"))
_HEX = np.isin(np.arange(256), np.frombuffer(b"0123456789abcdef", np.uint8))


class Steps(NamedTuple):
    """The lines of a piece of a journal."""

    columns: dict[str, np.ndarray]
    """Field -> float64 of shape (T,), of every number that the T steps have; NaN where it was not finite."""
    extra: dict[str, np.ndarray]
    """Figure of ``extra`` -> the same; NaN also where a step does not tell it."""
    others: list[tuple[int, bytes, int]]
    """(index of the line, its text, steps before it) of each line that is not a step as a run writes it."""
    num_lines: int


class _Pattern(NamedTuple):
    """The text of a step's line around its values."""

    texts: tuple[bytes, ...]
    """One more than there are values."""
    names: tuple[str, ...]
    """The field of each value, or the figure of ``extra``."""
    kinds: tuple[str, ...]
    """The kind of each value: ``int``, ``float``, ``hex``, or ``extra`` for a figure."""
    flags: tuple[tuple[str, bool], ...]
    """(field, value) of each that is true or false: these are part of the text."""

    @property
    def fields(self) -> set[str]:
        """Fields of the event, other than the figures of ``extra``."""
        named = zip(self.names, self.kinds, strict=True)
        return {name for name, kind in named if kind != "extra"} | {name for name, _ in self.flags}

    @property
    def commas(self) -> int:
        """Commas of a line."""
        return sum(text.count(b",") for text in self.texts)


def read_steps(data: bytes) -> Steps | None:
    """Return what ``data`` says; None unless all its steps are lines as a run writes them.

    Args:
        data: whole lines of a journal, the last one with its newline.
    """
    if len(data) > _MOST_BYTES or STEP not in data:
        return None
    text = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(text == _LINE)
    begins = np.concatenate([[0], ends[:-1] + 1])
    commas = np.flatnonzero(text == _COMMA)
    first_comma = np.searchsorted(commas, begins)
    num_commas = np.diff(first_comma, append=len(commas))
    is_read = np.zeros(len(ends), bool)
    found: list[tuple[np.ndarray, _Pattern, np.ndarray]] = []
    for pattern in _patterns(data, begins, ends, is_read):
        if len(found) == _MOST_PATTERNS or (found and pattern.fields != found[0][1].fields):
            return None
        rows = np.flatnonzero(~is_read & (num_commas == pattern.commas))
        bounds = _bounds(pattern, begins[rows], ends[rows], commas, first_comma[rows])
        is_like = _is_like(pattern, data, bounds)
        if not is_like.all():
            rows, bounds = rows[is_like], bounds[is_like]
        values = _numbers(pattern, data, bounds) if len(rows) else None
        if values is None:
            return None
        is_read[rows] = True
        found.append((rows, pattern, values))
    order = np.cumsum(is_read) - 1
    columns, extra = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for rows, pattern, values in found:
        at = order[rows]
        for name, kind, column in zip(pattern.names, pattern.kinds, values.T, strict=True):
            if kind != "hex":
                kept = extra if kind == "extra" else columns
                kept.setdefault(name, np.full(int(is_read.sum()), np.nan))[at] = column
        for name, flag in pattern.flags:
            columns.setdefault(name, np.full(int(is_read.sum()), np.nan))[at] = flag
    others = [(at, data[begins[at] : ends[at]], int(order[at]) + 1) for at in np.flatnonzero(~is_read).tolist()]
    return Steps(columns, extra, others, len(ends))


def _patterns(data: bytes, begins: np.ndarray, ends: np.ndarray, is_read: np.ndarray) -> Iterator[_Pattern]:
    """Yield the pattern of the first line that looks like a step and is not read yet, until there is none; ``is_read``
    changes meanwhile. A line that only looks like one ends it."""
    while True:
        left = np.flatnonzero(~is_read)
        line = next((one for at in left.tolist() if STEP in (one := data[begins[at] : ends[at]])), None)
        pattern = _pattern(line) if line is not None else None
        if pattern is None:
            return
        yield pattern


def _text(value: Any) -> str:
    """Return ``value`` as a journal writes it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _pattern(line: bytes) -> _Pattern | None:
    """Return the pattern of a line; None if it is not a step as a run writes it."""
    try:
        fields = json.loads(line)
        if not isinstance(event(fields), StepDone):
            return None
        written = _text(fields).encode()
    except (ValueError, RecursionError):
        return None
    if written != line or not _is_typed(fields):  # other spaces, a key twice, escapes
        return None
    texts, names, kinds, text = list[bytes](), list[str](), list[str](), "{"
    for key, value in fields.items():
        text += f"{', ' if text != '{' or texts else ''}{_text(key)}: "
        if key in ("format", "kind") or _type(key) == "bool":
            text += _text(value)
            continue
        is_extra = key == "extra"
        inside = dict.fromkeys(value, "extra") if is_extra else {key: _KINDS[_type(key)]}
        text += "{" if is_extra else ""
        for at, (name, kind) in enumerate(inside.items()):
            text += f"{', ' if at else ''}{_text(name)}: " if is_extra else ""
            quote = '"' if kind == "hex" else ""
            texts.append((text + quote).encode())
            names.append(name)
            kinds.append(kind)
            text = quote
        text += "}" if is_extra else ""
    flags = tuple((key, value) for key, value in fields.items() if _type(key) == "bool")
    return _Pattern((*texts, (text + "}").encode()), tuple(names), tuple(kinds), flags)


def _is_typed(fields: dict[str, Any]) -> bool:
    """Return whether flags are flags, texts are texts, and all else is a number or null; ``event`` takes 1 for true."""
    values = [(_type(key), value) for key, value in fields.items() if key not in ("format", "kind", "extra")]
    values += [("float", value) for value in fields.get("extra", {}).values()]
    types = {"bool": (bool,), "str": (str,)}
    return all(type(value) in types.get(kind, (int, float, type(None))) for kind, value in values)


@functools.cache
def _type(field: str) -> str:
    if field in ("format", "kind"):
        return ""
    return "float" if field == "time_s" else str(StepDone.__dataclass_fields__[field].type)


def _bounds(
    pattern: _Pattern, begins: np.ndarray, ends: np.ndarray, commas: np.ndarray, first_comma: np.ndarray
) -> np.ndarray:
    """Return where texts and values begin and end in ``n`` lines that have the pattern's number of commas, int32 of shape
    (n, 2 x values + 2): text, value, text, ..., value, text, and the newline."""
    before, after = pattern.texts[:-1], pattern.texts[1:]
    passed = np.cumsum([text.count(b",") for text in before])
    bounds = np.empty((len(begins), 2 * len(before) + 2), np.int32)
    bounds[:, 0], bounds[:, -1] = begins, ends
    offsets = np.array([text.index(b",") for text in after[:-1]], np.int64)
    bounds[:, 2:-2:2] = commas[first_comma[:, None] + passed[:-1]] - offsets
    bounds[:, -2] = ends - len(after[-1])
    bounds[:, 1:-1:2] = bounds[:, :-2:2] + np.array([len(text) for text in before], np.int32)
    return bounds


def _is_like(pattern: _Pattern, data: bytes, bounds: np.ndarray) -> np.ndarray:
    """Return which lines have the pattern's text before, between and after their values."""
    is_like: np.ndarray = np.all(bounds[:, 1:-1:2] < bounds[:, 2::2], axis=1)  # no value is empty
    is_text = np.arange(bounds.shape[1]) % 2 == 0
    for begin in range(0, len(bounds), _ROWS_COMPARED):
        which = begin + np.flatnonzero(is_like[begin : begin + _ROWS_COMPARED])
        found = _elements(pa.binary(), data, bounds[which], np.broadcast_to(is_text, (len(which), len(is_text))))
        same = pc.equal(found, _repeated(pattern)[: len(found)])
        if not pc.all(same).as_py():
            each = same.fill_null(True).to_numpy(zero_copy_only=False)
            is_like[which] = each.reshape(len(which), -1).all(axis=1)
    return is_like


def _elements(kind: pa.DataType, data: bytes, bounds: np.ndarray, is_known: np.ndarray) -> pa.Array:
    """Return the bytes from each bound (n, elements) to the next one; null those that are not known."""
    offsets = np.append(bounds, bounds[-1:, -1:])
    known = np.packbits(is_known, axis=None, bitorder="little")
    return pa.Array.from_buffers(kind, bounds.size, [pa.py_buffer(known), pa.py_buffer(offsets), pa.py_buffer(data)])


@functools.lru_cache(maxsize=4)
def _repeated(pattern: _Pattern) -> pa.Array:
    """Return what ``_elements`` returns of ``_ROWS_COMPARED`` lines of the pattern."""
    one = pa.array([element for text in pattern.texts for element in (text, None)], pa.binary())
    return pa.concat_arrays([one] * _ROWS_COMPARED)


def _numbers(pattern: _Pattern, data: bytes, bounds: np.ndarray) -> np.ndarray | None:
    """Return the values as float64 of shape (n, values), hex digits as NaN; None if one is not what JSON and ``event`` take."""
    text, kinds = np.frombuffer(data, np.uint8), np.array(pattern.kinds)
    begins, ends = np.ascontiguousarray(bounds[:, 1:-1:2], np.int64), np.ascontiguousarray(bounds[:, 2::2], np.int64)
    is_int, is_hex = kinds == "int", kinds == "hex"
    is_null = (text[begins] == _NULL) & ~(is_int | is_hex | (np.array(pattern.names) == "time_s"))
    is_number = ~(is_null | is_hex)
    if any(data[at:end] != b"null" for at, end in zip(begins[is_null].tolist(), ends[is_null].tolist(), strict=True)):
        return None
    if not _are_hex(text, begins[:, is_hex], ends[:, is_hex]) or not _are_numbers(text, begins, ends, is_number):
        return None
    is_known = np.zeros(bounds.shape, bool)
    is_known[:, 1:-1:2] = is_number
    try:
        found = pc.cast(_elements(pa.string(), data, bounds, is_known), pa.float64())
    except pa.ArrowInvalid:
        return None
    values = np.frombuffer(found.buffers()[1], np.float64, bounds.size).reshape(bounds.shape)[:, 1:-1:2]
    values = np.where(is_number, values, np.nan)
    whole = values[:, is_int]
    if not np.isfinite(values)[is_number].all():  # such as 1e999
        return None
    if not ((whole == np.floor(whole)) & (np.abs(whole) < LARGEST_INT)).all():
        return None
    return values


def _are_numbers(text: np.ndarray, begins: np.ndarray, ends: np.ndarray, which: np.ndarray) -> bool:
    """Return whether values begin and end as JSON's numbers do; what is between, the conversion to numbers judges."""
    first = text[begins]
    is_negative = first == _MINUS
    if (is_negative & which).any():
        begins = begins + is_negative
        first = text[begins]
    after = text[begins + 1]
    # digits are 48 to 57; after a leading zero the number ends, or goes on as 0.5 or 0e5
    ends_well = (first - _ZERO < 10) & (text[ends - 1] - _ZERO < 10) & (begins < ends)
    is_leading = (first == _ZERO) & (begins + 1 < ends) & (after != ord(".")) & (after | 32 != ord("e"))
    if not (ends_well & ~is_leading | ~which).all():
        return False
    places = _points_before_e(text)
    order = np.searchsorted(begins.ravel(), places, side="right") - 1
    return not ((order >= 0) & (places < ends.ravel()[order])).any()


def _points_before_e(text: np.ndarray) -> np.ndarray:
    """Return where ``.e`` or ``.E`` is: in the name of a source, or in 1.e5, which is not a number in JSON."""
    found = [np.empty(0, np.int64)]
    for begin in (0, 1):  # two bytes at a time
        pairs = np.frombuffer(text, "<u2", (len(text) - begin) // 2, begin)
        found += [begin + 2 * np.flatnonzero(pairs == word) for word in _POINT_E if (pairs == word).any()]
    return np.concatenate(found)


def _are_hex(text: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> bool:
    """Return whether values are hex digits, all of one length."""
    if not begins.size:
        return True
    size = int((ends - begins).flat[0])
    windows = np.lib.stride_tricks.sliding_window_view(text, size)
    return bool((ends - begins == size).all() and _HEX[windows[begins.ravel()]].all())
