"""Whether a run may begin at step 0. It may if it never committed a checkpoint; otherwise only if its user asks for it:
if no checkpoint counts any more, a person must look at the loss before everything is trained again.
"""

from __future__ import annotations

from springtide.checkpoint import leases
from springtide.checkpoint.format import (
    COMMITTED,
    Identity,
    Meta,
    abandon,
    committed,
    listed,
    name_of,
    read_manifest,
    term_of,
)
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
        f"{run.url} has committed checkpoints before, and none of them counts now: `springtide inspect {run.url}` says why "
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


# Checkpoints that were trained in another data order than the run has now.


def of_another_order(run: Folder, meta: Meta, identity: Identity) -> str:
    """Return why a checkpoint is not of this run's data order; empty if it is."""
    wanted = identity(meta.step)
    if meta.order_identity == wanted:
        return ""
    return (
        f"checkpoint {name_of(meta.step)} of {run.url} was trained in the order {meta.order_identity}, this run has "
        f"{wanted}: another dataset, other labels, another seed, batch, lanes or window, or other weights or skips of steps "
        "that are done; use those that it was trained with, or a new run.id"
    )


def newer_of_other_orders(run: Folder, identity: Identity, go_back: bool) -> list[str] | None:
    """Return the checkpoints newer than the newest of this run's data order, newest first; None if there are checkpoints and
    none is of this order. Raises CheckpointError, without ``go_back``, if the newest is not of this order."""
    others: list[str] = []
    for name in reversed(committed(run)):
        try:
            meta = read_manifest(run, name).meta
        except CheckpointError:
            continue  # the restore quarantines it
        problem = of_another_order(run, meta, identity)
        if not problem:
            return others
        if not go_back:
            raise CheckpointError(
                f"{problem}, or pass --accept-changes to resume from the newest checkpoint of this order"
            )
        others.append(name)
    return None if others else []


def check_order(run: Folder, identity: Identity, go_back: bool, term: int = 0) -> bool:
    """As ``newer_of_other_orders``, and mark those checkpoints as abandoned by ``term``; their bytes stay. Returns False,
    and marks nothing, if none is of this order."""
    others = newer_of_other_orders(run, identity, go_back)
    if others:
        abandon(run, others, "the run resumed from an older checkpoint in another data order", term)
    return others is not None
