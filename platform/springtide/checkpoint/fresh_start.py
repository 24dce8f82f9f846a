"""Whether a run may begin at step 0. One that never committed may; one that has may not, unless its user says so: a folder in
which no checkpoint counts any more is a loss to be looked at, not a reason to train everything again.
"""

from __future__ import annotations

from springtide.checkpoint import leases
from springtide.checkpoint.format import COMMITTED, abandon, committed, listed, term_of
from springtide.errors import CheckpointError
from springtide.store import Folder


def has_ever_committed(run: Folder) -> bool:
    """Whether a checkpoint was committed since the run last began at step 0 by request, whatever became of it: its commit was
    noted with the claim, or its marker is still there."""
    if leases.has_committed(run):
        return True
    begun = leases.begun_at(run)
    of_runs = (files for files in listed(run).values() if COMMITTED in files)
    return any((term_of(file) or 0) > begun for files in of_runs for file in files)


def check_fresh_start(run: Folder) -> None:
    """CheckpointError when the run would begin at step 0 although it has committed before."""
    if committed(run) or not has_ever_committed(run):
        return
    raise CheckpointError(
        f"{run.url} has committed checkpoints before, and none of them counts now: `springtide run inspect {run.url}` says why "
        "(quarantined, abandoned, or removed). Bring one back, or say --from-scratch to begin again at step 0"
    )


def begin_from_scratch(run: Folder, term: int) -> list[str]:
    """Have the run begin at step 0 under ``term``; returns the checkpoints that counted until now. They are marked as
    abandoned, and go as new ones come."""
    older = committed(run)
    leases.note_scratch(run, term)
    abandon(run, older, "the run was begun again with --from-scratch", term)
    return older
