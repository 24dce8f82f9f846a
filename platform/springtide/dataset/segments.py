"""Merge parts into segments, the first pass of the shuffle. A segment holds the documents of neighbouring parts of one source.

    parts      a few MiB each, one per unit       read whole, one request each
    segments   about 128 MiB each                 shards read one range of each segment of their source, or two

Without segments, a shard would read from every part, and requests would grow with the square of the text. There are about
thirty times fewer segments than parts. Documents are sorted by key. Those that may be held out come first; otherwise shards
of held-out text would read everything. Segments do not depend on which process made the parts, or when.
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
"""Total size of the parts that are merged into a segment [bytes]. The process that merges the parts holds them in memory
twice."""
_FOLDER = "segments"


class Segment(NamedTuple):
    """Documents of one source, sorted by key."""

    number: int
    source: str
    sizes: Sizes

    def file(self, work: Folder, token_type: str) -> ColumnFile:
        """Return the segment's file in ``work``."""
        return ColumnFile(work, _name(self.number), Layout(self.sizes, token_type, has_bands=True))


@dataclasses.dataclass(frozen=True)
class MergeJob:
    """The input to merge parts (files of the documents of one unit) into one segment. Picklable."""

    segment: Segment
    parts: tuple[Part, ...]
    token_type: str
    heldout_fraction: float
    work: Folder

    @property
    def output(self) -> str:
        """Name of the segment's file."""
        return _name(self.segment.number)


def merges(work: Folder, parts: Sequence[Part], settings: ShardsConfig) -> list[MergeJob]:
    """Group ``parts`` (files of prepared documents, in the order of the sources) into segments, and return one job per
    segment."""
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
