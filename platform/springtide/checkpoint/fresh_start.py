"""Whether a run may begin at step 0. It may if it never committed a checkpoint; otherwise only if its user asks for it:
if no checkpoint counts any more, a person must look at the loss before everything is trained again.
"""

from __future__ import annotations

from springtide.checkpoint import leases
from springtide.checkpoint.format import COMMITTED, abandon, committed, listed, term_of
from springtide.errors import CheckpointError
from springtide.storage import Folder


def has_ever_committed(run: Folder) -> bool:
    """Return whether a checkpoint was committed since the run last began at step 0 by request, even if it does not
    count now: the lease has a record of the commit, or the commit marker still exists."""
    if leases.has_committed(run):
        return True
    begun = leases.begun_at(run)
    of_runs = (files for files in listed(run).values() if COMMITTED in files)
    return any((term_of(file) or 0) > begun for files in of_runs for file in files)


def check_fresh_start(run: Folder) -> None:
    """Raise CheckpointError if the run would begin at step 0 although it has committed before."""
    if committed(run) or not has_ever_committed(run):
        return
    raise CheckpointError(
        f"{run.url} has committed checkpoints before, and none of them counts now: `springtide run inspect {run.url}` says why "
        "(quarantined, abandoned, or removed). Bring one back, or pass --from-scratch to begin again at step 0"
    )


def begin_once(run: Folder, term: int, job: str) -> bool:
    """As ``begin_from_scratch``, but only if the same ``job`` did not ask for it before: what starts a group again gives it the
    arguments of the first. Returns whether the run begins at step 0 now."""
    if job and job in leases.scratch_jobs(run):
        return False
    begin_from_scratch(run, term, job)
    return True


def begin_from_scratch(run: Folder, term: int, job: str = "") -> list[str]:
    """Have the run begin at step 0 under lease ``term``, at the request of ``job``, if it has a name. Returns the checkpoints
    that counted until now; they are marked as abandoned, and retention removes them as new ones are committed. If that breaks
    off, the newest still counts, and the run goes on from it."""
    older = committed(run)
    abandon(run, older, "the run was begun again with --from-scratch", term)
    leases.note_scratch(run, term, job)
    return older
