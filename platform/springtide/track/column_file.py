"""A full segment of a journal once more, as numbers: what reads a million steps reads these files, not a million lines of JSON.

    <run>/journal/0002-0000.columns     beside 0002-0000.jsonl

    springtide journal columns 1
    {"segment_bytes": 6100000, "lines": 10000, "steps": 9990, "columns": ["step", ...], "extra": ["loss/code"],
     "others": [[120, 121, "{...}"], ...]}                   one line; (steps before it, its number, text) of every other event
    float64, little-endian: each column with its steps, one column after the other
    crc32 of all of that, 4 bytes, little-endian

The segment is the truth. Whoever reads goes back to it where this file is missing, damaged or of another size of the segment.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np

from springtide.store import to_json
from springtide.track.step_lines import STEP, read_steps
from springtide.track.timeline import COLUMNS, LATEST_S, MOST_EXTRAS, StepColumns, columns_read

_MAGIC = b"springtide journal columns 1\n"
_MOST_STEPS = 1_000_000
"""Most steps of one file: a journal's segment has 10,000 lines."""
_CRC = struct.Struct("<I")


class SegmentColumns(NamedTuple):
    """What a segment says."""

    segment_bytes: int
    """Size of the segment that this was made of."""
    num_lines: int
    steps: StepColumns
    others: list[tuple[int, int, bytes]]
    """(steps before it, its number from 1, text) of each line that is not a step."""


def columns_in(segment: bytes) -> SegmentColumns | None:
    """Return what a full segment's lines say; None if one is a step that no run writes like that: ``event`` must judge it.

    Args:
        segment: whole lines, the last one with its newline.
    """
    found = read_steps(segment)
    steps = columns_read(found) if found is not None else None
    if found is None or steps is None or any(STEP in line for _, line, _ in found.others):
        return None
    others = [(before, at + 1, line) for at, line, before in found.others]
    return SegmentColumns(len(segment), found.num_lines, steps, others)


def encode(found: SegmentColumns) -> bytes:
    """Return the bytes of the file. UnicodeDecodeError if a line is not UTF-8."""
    steps = found.steps
    head = {
        "segment_bytes": found.segment_bytes,
        "lines": found.num_lines,
        "steps": len(steps),
        "columns": list(COLUMNS),
        "extra": list(steps.extra),
        "others": [(before, number, line.decode()) for before, number, line in found.others],
    }
    columns = [np.asarray(column, "<f8") for column in (*(steps[name] for name in COLUMNS), *steps.extra.values())]
    parts = [_MAGIC, to_json(head, ensure_ascii=False).encode(), b"\n", *(column.tobytes() for column in columns)]
    data = b"".join(parts)
    return data + _CRC.pack(zlib.crc32(data))


def decode(data: bytes) -> SegmentColumns | None:
    """Return what a file says; None if it is damaged, from another version, or says what no run writes."""
    body = memoryview(data)[: -_CRC.size]
    if not data.startswith(_MAGIC) or len(data) < len(_MAGIC) + _CRC.size:
        return None
    if _CRC.pack(zlib.crc32(body)) != data[-_CRC.size :]:
        return None
    end = data.find(b"\n", len(_MAGIC))
    try:
        head = json.loads(data[len(_MAGIC) : end])
        others = [(before, number, text.encode()) for before, number, text in head["others"]]
        size, lines, steps, extra = (head[name] for name in ("segment_bytes", "lines", "steps", "extra"))
        is_whole = _is_whole(head, others)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    num_columns = len(COLUMNS) + len(extra)
    if end < 0 or not is_whole or len(body) - end - 1 != 8 * steps * num_columns:
        return None
    table = np.frombuffer(body, "<f8", steps * num_columns, end + 1).reshape(num_columns, steps)
    columns = StepColumns(dict(zip(COLUMNS, table, strict=False)), dict(zip(extra, table[len(COLUMNS) :], strict=True)))
    return SegmentColumns(size, lines, columns, others) if _is_possible(columns) else None


def _is_whole(head: dict[str, Any], others: list[tuple[int, int, bytes]]) -> bool:
    """Return whether counts are counts and the names are those of this version."""
    counts = [head["segment_bytes"], head["lines"], head["steps"], *(one for pair in others for one in pair[:2])]
    names = head["extra"]
    return (
        all(type(count) is int and count >= 0 for count in counts)
        and head["steps"] <= _MOST_STEPS
        and head["lines"] == head["steps"] + len(others)
        and all(before <= head["steps"] and 1 <= number <= head["lines"] for before, number, _ in others)
        and head["columns"] == list(COLUMNS)
        and all(type(name) is str for name in names)
        and len(set(names)) == len(names) <= MOST_EXTRAS
    )


def _is_possible(steps: StepColumns) -> bool:
    """Return whether times are times and whole numbers are whole, as ``event`` demands of a line."""
    times = steps["time_s"]
    whole = np.array([steps[name] for name in COLUMNS[: COLUMNS.index("memory_bytes") + 1]])
    is_whole = np.isfinite(whole) & (whole == np.floor(whole))
    return bool(((times >= 0) & (times <= LATEST_S)).all() and is_whole.all())
