"""Find exact repetitions of lines or paragraphs in the corpus, with any number of processes, before the parts are made.

    unit   -> pieces     hash and index of each piece           raw arrays, sorted by hash; and their counts by top byte
    bucket -> repeats    unit and index of each repeated piece  Parquet, sorted by unit
    unit   -> parts      documents without the repeats          parts.py

A piece is a line or a paragraph; a unit is a few source files, or a range of one. A bucket is all pieces whose hash begins with
a byte in some range, so equal pieces are in one bucket. Of equal pieces, the first in the order of units stays, so the result
depends only on the sources.
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
"""Target for the number of pieces (lines or paragraphs) in a bucket. One process holds a bucket in memory. There are at most
256 buckets, so a corpus of more than 2^30 pieces has larger buckets."""
_ROWS_A_GROUP = 2**16


def write_pieces(work: Folder, unit: int, texts: Iterable[str], kind: str) -> None:
    """Write the hashes of the lines or paragraphs in ``texts``, the documents of a unit (a few source files, or a range of
    one). Do nothing if they were written before. ``kind``: ``lines`` or ``paragraphs``."""
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
    """Input of ``find_repeats``, which finds the repeated lines or paragraphs of one bucket, a range of hashes. Picklable."""

    number: int
    first: int
    last: int
    """The bucket has the hashes whose top byte is in [first, last)."""
    units: int
    work: Folder

    def done(self) -> bool:
        """Return True if the file with this bucket's repeated pieces was already written."""
        return self.work.exists(_bucket(self.number))


def buckets(work: Folder, units: int) -> list[BucketJob]:
    """Return the jobs for ``find_repeats``, one per bucket. A bucket is a range of hashes of lines or paragraphs; all buckets
    together cover all units."""
    total = sum(sum(work.read_json(_counts(unit))["pieces"]) for unit in range(units))
    width = _BYTES
    while width > 1 and total * width > _BUCKET_PIECES * _BYTES:
        width //= 2
    return [
        BucketJob(number, first, first + width, units, work) for number, first in enumerate(range(0, _BYTES, width))
    ]


def find_repeats(job: BucketJob) -> None:
    """Find the lines or paragraphs in a bucket (a range of hashes) that occurred earlier in the corpus. For each, write its
    unit (a few source files, or a range of one) and its index in the unit. Do nothing if the output file exists."""
    if job.done():
        return
    found = list(_pieces_of(job))
    pieces = np.concatenate([one for _, one in found])
    unit = np.repeat([number for number, _ in found], [len(one) for _, one in found])
    order = np.argsort(pieces["digest"], kind="stable")  # stable: equal pieces stay in the order of units
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
    """Removes the repeated lines or paragraphs (pieces) from the documents of one unit. Documents must come in their order."""

    def __init__(self, work: Folder, unit: int, kind: str, buckets: int) -> None:
        self._kind, self._place = kind, -1
        places: list[int] = []
        for number in range(buckets):
            with work.open(_bucket(number)) as file:
                places += pq.read_table(file, columns=["place"], filters=[("unit", "=", unit)])["place"].to_pylist()
        self._places = frozenset(places)

    def remove(self, text: str) -> tuple[str, list[str]]:
        """Return ``text``, the next document of the unit, without its repeated pieces (lines or paragraphs), and the removed
        pieces. Call it once for each document, in order: a repeated piece is known only by its index in the unit."""
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
