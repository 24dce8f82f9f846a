"""A sweep that a driver holds: its folder, and what may be written there only while the lease holds."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator

from springtide.checkpoint import leases
from springtide.tune import Point, SweepFolder, TrialEnd


@dataclasses.dataclass(frozen=True)
class HeldSweep:
    """A sweep's folder and the term of a driver's lease on it. Ray Tune pickles it into a file: it has no config, so no
    password."""

    folder: SweepFolder
    term: int

    def check(self) -> None:
        """Raise RunExists if another driver has claimed the sweep."""
        leases.check(self.folder.root, self.term)

    def begin_trial(self, number: int, point: Point) -> None:
        """Record a point before it is tried. Raises as ``check``."""
        self.check()
        self.folder.write_point(number, point)

    def end_trial(self, number: int, status: str, reason: str) -> None:
        """Record that a trial must not continue, and why. Raises as ``check``."""
        self.check()
        self.folder.write_end(number, TrialEnd(status, reason))


@contextlib.contextmanager
def hold_sweep(folder: SweepFolder) -> Iterator[HeldSweep]:
    """Hold the sweep, as a driver holds a run. Raises RunExists if another driver holds it."""
    lease = leases.claim(folder.root, secrets.token_hex(8), trains=False)
    try:
        yield HeldSweep(folder, lease.term)
    finally:
        leases.end(folder.root, lease.term)
