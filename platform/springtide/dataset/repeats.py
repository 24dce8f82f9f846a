"""Find exact repetitions of lines or paragraphs in the corpus, with any number of processes, before the parts are made.

    unit   -> pieces     digest, place in the unit              raw arrays, sorted by digest; and their counts by top byte
    bucket -> repeats    unit, place in the unit                Parquet, sorted by unit; a bucket has a range of top bytes
    unit   -> parts      documents without the repeats          parts.py

The first occurrence in the order of units stays, so what is removed depends on the sources alone.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from springtide.corpus import Piece, without
from springtide.storage import Folder

_BYTES = 256
_PIECE = np.dtype([("digest", "<u8"), ("place", "<u4")])
_BUCKET_PIECES = 2**22
"""Most pieces (lines or paragraphs) of a bucket, which one process compares at once. A corpus of over 256 times as many has
larger buckets."""
_ROWS_A_GROUP = 2**16


def write_pieces(work: Folder, unit: int, texts: Iterable[str], kind: str) -> None:
    """Write the digests of the lines or paragraphs in the documents of a unit (a few source files, or a range of one), unless
    they were already written."""
    if work.exists(_counts(unit)):
        return
    digests: list[int] = []

    def noted(piece: Piece) -> bool:
        digests.append(piece.digest)
        return False

    for text in texts:
        without(text, kind, noted)
    found = np.zeros(len(digests), _PIECE)
    found["digest"], found["place"] = np.array(digests, np.uint64), np.arange(len(digests))
    found.sort(order=("digest", "place"))
    by_byte = np.bincount((found["digest"] >> np.uint64(56)).astype(np.int64), minlength=_BYTES)
    work.write(_pieces(unit), found.tobytes())
    work.write_json(_counts(unit), {"pieces": by_byte.tolist()})


@dataclasses.dataclass(frozen=True)
class BucketJob:
    """The input to find the repeated pieces (lines or paragraphs) of one bucket, a range of digests. Picklable."""

    number: int
    first: int
    last: int
    """The top byte of the bucket's digests is in [first, last)."""
    units: int
    work: Folder

    def done(self) -> bool:
        """Return True if the file with this bucket's repeated pieces was already written."""
        return self.work.exists(_bucket(self.number))


def buckets(work: Folder, units: int) -> list[BucketJob]:
    """Return one job per bucket, a range of digests. Together the buckets hold the pieces (lines or paragraphs) of all
    units."""
    total = sum(sum(work.read_json(_counts(unit))["pieces"]) for unit in range(units))
    width = _BYTES
    while width > 1 and total * width > _BUCKET_PIECES * _BYTES:
        width //= 2
    return [
        BucketJob(number, first, first + width, units, work) for number, first in enumerate(range(0, _BYTES, width))
    ]


def find_repeats(job: BucketJob) -> None:
    """Write the unit (range of the source), and the index in the unit, of every line or paragraph in a bucket that occurred
    before, unless they were already written."""
    if job.done():
        return
    found = list(_pieces_of(job))
    pieces = np.concatenate([one for _, one in found])
    unit = np.repeat([number for number, _ in found], [len(one) for _, one in found])
    order = np.argsort(pieces["digest"], kind="stable")  # stable: equal digests stay in the order of units and places
    digests = pieces["digest"][order]
    again = np.sort(order[1:][digests[1:] == digests[:-1]])
    out = io.BytesIO()
    columns: dict[str, Any] = {"unit": unit[again].astype(np.int32), "place": pieces["place"][again]}
    pq.write_table(pa.table(columns), out, row_group_size=_ROWS_A_GROUP)
    job.work.write(_bucket(job.number), out.getvalue())


def _pieces_of(job: BucketJob) -> Iterator[tuple[int, np.ndarray]]:
    for unit in range(job.units):
        counts = job.work.read_json(_counts(unit))["pieces"]
        begin, count = sum(counts[: job.first]), sum(counts[job.first : job.last])
        data = (
            job.work.read_range(_pieces(unit), begin * _PIECE.itemsize, (begin + count) * _PIECE.itemsize)
            if count
            else b""
        )
        yield unit, np.frombuffer(data, _PIECE)


class Repeats:
    """The repeated lines or paragraphs (pieces) of one unit, to remove from its documents in their order."""

    def __init__(self, work: Folder, unit: int, kind: str, buckets: int) -> None:
        self._kind, self._place = kind, -1
        places: list[int] = []
        for number in range(buckets):
            with work.open(_bucket(number)) as file:
                places += pq.read_table(file, columns=["place"], filters=[("unit", "=", unit)])["place"].to_pylist()
        self._places = frozenset(places)

    def remove(self, text: str) -> tuple[str, list[str]]:
        """Return the text of the unit's next document without its repeated pieces (lines or paragraphs), and the removed
        pieces. Must be called once for each document in order, because a piece is found by its index in the unit."""
        return without(text, self._kind, self._next)

    def _next(self, piece: Piece) -> bool:
        self._place += 1
        return self._place in self._places


_FOLDER = "repeats"


def _pieces(unit: int) -> str:
    return f"{_FOLDER}/{unit:06d}.pieces"


def _counts(unit: int) -> str:
    return f"{_FOLDER}/{unit:06d}.json"


def _bucket(number: int) -> str:
    return f"{_FOLDER}/{number:03d}.parquet"
