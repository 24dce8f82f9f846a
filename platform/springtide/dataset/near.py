"""Find near-duplicates among the documents of all segments. For each band of the signatures, in parallel, store which documents
share a hash (a bucket); then compare the pairs in all buckets.

segments -> buckets   rows whose hash in one band is shared, and a number for each hash     find_sharing, 16 jobs
buckets  -> pairs     compare the few documents in the buckets                              near_duplicates_among
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from springtide.corpus import BANDS, BINS, NearDuplicates, find_near_duplicates, sharing
from springtide.dataset.segments import Segment
from springtide.errors import damaged
from springtide.storage import Folder

_FOLDER = "near"
_ROW_BYTES = 16


@dataclasses.dataclass(frozen=True)
class BandJob:
    """The input to find the documents that share a hash in one band of their signatures. Picklable."""

    band: int
    segments: tuple[Segment, ...]
    token_type: str
    work: Folder

    @property
    def output(self) -> str:
        """Name of the file that the job writes into ``work``."""
        return _name(self.band)


def bands(work: Folder, segments: Sequence[Segment], token_type: str) -> list[BandJob]:
    """Return one job per band of the signatures."""
    return [BandJob(band, tuple(segments), token_type, work) for band in range(BANDS)]


def find_sharing(job: BandJob) -> None:
    """Write the rows whose hash in the job's band is shared, and a number for each such hash, unless the output exists. Rows
    are numbered across all segments. Reads one range per segment; takes about 32 bytes of memory per document."""
    if not job.work.exists(job.output):
        column = read_bands(job.work, job.segments, job.token_type, job.band)
        job.work.write(job.output, np.stack(sharing(column)).astype("<i8").tobytes())


def near_duplicates_among(
    work: Folder, segments: Sequence[Segment], token_type: str, order: np.ndarray
) -> NearDuplicates:
    """Find near-duplicates among the documents whose rows are ``order``. The first of each group of similar documents is kept.

    Memory holds the pairs to compare and the rows of one band at a time. The sketches (hashes to compare) of documents that
    share a hash go to a temporary file on this machine, 128 bytes each.

    Args:
        order: int64 (n,), rows numbered across all segments. The result refers to documents by their index in ``order``.
    """
    rows = sum(segment.sizes.documents for segment in segments)
    place = np.full(rows, -1, np.int64)
    place[order] = np.arange(len(order))

    def buckets() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for band in range(BANDS):
            found, groups = _read(work, band)
            documents = place[found]
            groups, documents = groups[documents >= 0], documents[documents >= 0]
            by_group = np.lexsort((documents, groups))
            yield documents[by_group], groups[by_group]

    with tempfile.TemporaryFile() as file:

        def sketches(shared: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
            wanted = np.sort(order[shared])
            stored_at = np.zeros(len(order), np.int32)
            stored_at[shared] = np.searchsorted(wanted, order[shared])
            begin = 0
            for segment in segments:
                first, last = np.searchsorted(wanted, [begin, begin + segment.sizes.documents])
                if first < last:
                    found = segment.file(work, token_type).read("sketch")
                    file.write(found[wanted[first:last] - begin].tobytes())
                begin += segment.sizes.documents
            file.flush()
            stored = np.memmap(file, np.uint8, "r", shape=(len(wanted), BINS))
            return lambda some: stored[stored_at[some]]

        return find_near_duplicates(buckets, sketches, len(order))


def _read(work: Folder, band: int) -> np.ndarray:
    """Return what ``find_sharing`` wrote for a band: the rows that share a hash, and the number of each row's hash, int64 (2,
    rows)."""
    size = work.size(_name(band))
    data = work.read_range(_name(band), 0, size) if size else b""
    if size % _ROW_BYTES or len(data) != size:
        problem = f"has {len(data)} bytes, {_ROW_BYTES} a row; remove it, and run the same command again"
        raise damaged(work.where(_name(band)), problem)
    return np.frombuffer(data, "<i8").reshape(2, -1)


def read_bands(work: Folder, segments: Sequence[Segment], token_type: str, band: int) -> np.ndarray:
    """Return the hash of one band of every document, uint64 (rows,), in the order of the segments."""
    return np.concatenate([segment.file(work, token_type).read(f"band{band}") for segment in segments])


def _name(band: int) -> str:
    return f"{_FOLDER}/{band:02d}.rows"
