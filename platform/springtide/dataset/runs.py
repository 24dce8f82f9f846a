"""Parts -> runs: the first pass of the shuffle. A run holds the documents of neighbouring parts of one source, sorted by key.

    parts   a few MiB each, one per unit          read whole, one request each
    runs    about 128 MiB each                    shards read one range of each run of their source, or two

A shard would have to look into every part: requests that grow with the square of the text. It looks into every run, which are
thirty times fewer. Documents that may be held out stand before the others, or shards of held-out text would read everything.
Runs do not depend on who made the parts, or when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from springtide.config.data import ShardsConfig
from springtide.dataset.columns import ColumnFile, Layout, Sizes, in_order
from springtide.dataset.parts import Part, part_file
from springtide.store import Folder

_RUN_BYTES = 128 * 2**20
"""Size of the parts of a run [bytes]; the process that merges them holds them twice."""
_FOLDER = "runs"


class Run(NamedTuple):
    """Documents of one source, sorted by key."""

    number: int
    source: str
    sizes: Sizes

    def file(self, work: Folder, token_type: str) -> ColumnFile:
        """Return its file."""
        return ColumnFile(work, _name(self.number), Layout(self.sizes, token_type, has_bands=True))


@dataclasses.dataclass(frozen=True)
class MergeJob:
    """The input to make one run. Picklable."""

    run: Run
    parts: tuple[Part, ...]
    token_type: str
    heldout_fraction: float
    work: Folder

    @property
    def output(self) -> str:
        """Name of its file."""
        return _name(self.run.number)


def merges(work: Folder, parts: Sequence[Part], settings: ShardsConfig) -> list[MergeJob]:
    """Return the jobs that make the runs of all parts, which are in the order of the source."""
    groups: list[list[Part]] = []
    held = 0
    for part in parts:
        size = Layout(part.sizes, settings.token_type, has_bands=False).num_bytes
        if not groups or groups[-1][-1].source != part.source or held + size > _RUN_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(part)
        held += size
    jobs = []
    for number, group in enumerate(groups):
        total = Sizes(*(sum(many) for many in zip(*(part.sizes for part in group), strict=True)))
        run = Run(number, group[0].source, total)
        jobs.append(MergeJob(run, tuple(group), settings.token_type, settings.heldout_fraction, work))
    return jobs


def merge(job: MergeJob) -> None:
    """Merge the parts of a run, unless that was done."""
    if not job.work.exists(job.output):
        found = [part_file(job.work, part, job.token_type).read_all() for part in job.parts]
        job.run.file(job.work, job.token_type).write(in_order(found, job.heldout_fraction))


def made_runs(work: Folder) -> frozenset[str]:
    """Return the names of the runs that are there, by one listing."""
    return frozenset(f"{_FOLDER}/{name}" for name in (work / _FOLDER).names())


def _name(number: int) -> str:
    return f"{_FOLDER}/{number:06d}.columns"
