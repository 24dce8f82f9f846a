"""Find near-duplicates among the documents of all segments (sorted files of documents). Each document has 16 band hashes.
Similar documents very probably have an equal hash in some band. A bucket is all documents with an equal hash in a band.

segments -> buckets   for each band, in parallel: store the buckets of two or more documents     find_sharing, 16 jobs
buckets  -> pairs     compare documents in the buckets by their sketches                         near_duplicates_among
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
    """Input of ``find_sharing``, which finds the documents with equal hashes in one of 16 bands. Picklable."""

    band: int
    segments: tuple[Segment, ...]
    token_type: str
    work: Folder

    @property
    def output(self) -> str:
        """Name of the file that the job writes into ``work``."""
        return _name(self.band)


def bands(work: Folder, segments: Sequence[Segment], token_type: str) -> list[BandJob]:
    """Return the 16 jobs for ``find_sharing``, one per band hash of a document."""
    return [BandJob(band, tuple(segments), token_type, work) for band in range(BANDS)]


def find_sharing(job: BandJob) -> None:
    """Find the documents whose hash in the job's band equals the hash of another document. Write their row numbers, counted
    across all segments, and for each row a number that is equal for equal hashes. Do nothing if the output file exists.
    Reads one range per segment; needs about 32 bytes of memory per document."""
    if not job.work.exists(job.output):
        column = read_bands(job.work, job.segments, job.token_type, job.band)
        job.work.write(job.output, np.stack(sharing(column)).astype("<i8").tobytes())


def near_duplicates_among(
    work: Folder, segments: Sequence[Segment], token_type: str, order: np.ndarray
) -> NearDuplicates:
    """Find near-duplicates among n documents. Of several similar documents, the first in ``order`` is kept.

    Memory holds the pairs to compare and the rows of one band at a time. The sketches (128 bytes per document, which estimate
    similarity) of the documents to compare go to a temporary file on this machine.

    Args:
        order: int64 (n,), row numbers of the documents, counted across all segments. The result refers to a document by its
            index in ``order``.
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
    """Read what ``find_sharing`` wrote for a band, int64 (2, n): the n rows whose hash is not unique, and for each of
    these rows a number that is equal for equal hashes."""
    size = work.size(_name(band))
    data = work.read_range(_name(band), 0, size) if size else b""
    if size % _ROW_BYTES or len(data) != size:
        problem = f"has {len(data)} bytes, {_ROW_BYTES} a row; remove it, and run the same command again"
        raise damaged(work.where(_name(band)), problem)
    return np.frombuffer(data, "<i8").reshape(2, -1)


def read_bands(work: Folder, segments: Sequence[Segment], token_type: str, band: int) -> np.ndarray:
    """Return one of the 16 band hashes of every document, uint64 (documents,), in the order of the segments."""
    return np.concatenate([segment.file(work, token_type).read(f"band{band}") for segment in segments])


def _name(band: int) -> str:
    return f"{_FOLDER}/{band:02d}.rows"
