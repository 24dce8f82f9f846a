"""Merge parts (files of prepared documents) into segments (larger, sorted files), the first pass of the shuffle. A segment
holds the documents of consecutive parts of one source.

    parts      a few MiB each, one per unit       each is read whole, in one request
    segments   about 128 MiB each                 a shard reads one or two ranges of each segment of its source

Without segments, each shard would read from every part, and the number of requests would grow with the square of the text.
There are about 30 times fewer segments than parts. Documents that may be held out come first in a segment, so that a held-out
shard reads only the beginning of each segment. The other documents follow. Both groups are sorted by key, a hash of the text.
Segments have the same bytes no matter which process made the parts, or when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from springtide.config.data import ShardsConfig
from springtide.dataset.columns import ColumnFile, Layout, Sizes, in_order
from springtide.dataset.parts import Part, part_file
from springtide.storage import Folder

_SEGMENT_BYTES = 128 * 2**20
"""Maximum total size of the parts (files of prepared documents) that are merged into a segment [bytes]. The process that merges
the parts holds them twice in memory."""
_FOLDER = "segments"


class Segment(NamedTuple):
    """A temporary file with documents of one source, sorted by key (a hash of the text)."""

    number: int
    source: str
    sizes: Sizes

    def file(self, work: Folder, token_type: str) -> ColumnFile:
        """Return the file of the segment in the folder ``work``."""
        return ColumnFile(work, _name(self.number), Layout(self.sizes, token_type, has_bands=True))


@dataclasses.dataclass(frozen=True)
class MergeJob:
    """Input of ``merge``, which merges parts (files of prepared documents) into one segment, a sorted file. Picklable."""

    segment: Segment
    parts: tuple[Part, ...]
    token_type: str
    heldout_fraction: float
    work: Folder

    @property
    def output(self) -> str:
        """Name of the segment's file, which the job writes."""
        return _name(self.segment.number)


def merges(work: Folder, parts: Sequence[Part], settings: ShardsConfig) -> list[MergeJob]:
    """Group ``parts`` (files of prepared documents, in the order of the sources) into segments of up to 128 MiB. Return one
    merge job per segment."""
    groups: list[list[Part]] = []
    held = 0
    for part in parts:
        size = Layout(part.sizes, settings.token_type, has_bands=False).num_bytes
        if not groups or groups[-1][-1].source != part.source or held + size > _SEGMENT_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(part)
        held += size
    jobs = []
    for number, group in enumerate(groups):
        total = Sizes(*(sum(many) for many in zip(*(part.sizes for part in group), strict=True)))
        segment = Segment(number, group[0].source, total)
        jobs.append(MergeJob(segment, tuple(group), settings.token_type, settings.heldout_fraction, work))
    return jobs


def merge(job: MergeJob) -> None:
    """Merge the parts of a segment (files of prepared documents) and write the segment's file, unless the file exists."""
    if not job.work.exists(job.output):
        found = [part_file(job.work, part, job.token_type).read_all() for part in job.parts]
        job.segment.file(job.work, job.token_type).write(in_order(found, job.heldout_fraction))


def _name(number: int) -> str:
    return f"{_FOLDER}/{number:06d}.columns"
