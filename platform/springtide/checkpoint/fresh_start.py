"""Decide if a run may begin at step 0.

A run that never committed a checkpoint may begin there. Any other run may do so only if its user asks for it: if all its
checkpoints were quarantined, abandoned or removed, a person must check what was lost before everything is trained again.
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
    """Return True if a checkpoint was committed since the run's last start with ``--from-scratch``, even if the checkpoint was
    quarantined or removed since. Evidence is a lease's record of the commit, or a commit marker that still exists."""
    if leases.has_committed(run):
        return True
    begun = leases.begun_at(run)
    of_runs = (files for files in listed(run).values() if COMMITTED in files)
    return any((term_of(file) or 0) > begun for files in of_runs for file in files)


def check_fresh_start(run: Folder) -> None:
    """Raise CheckpointError if the run has committed checkpoints before, but all are quarantined, abandoned or removed now."""
    if committed(run) or not has_ever_committed(run):
        return
    raise CheckpointError(
        f"{run.url} has committed checkpoints before, and none of them counts now: `springtide inspect {run.url}` says why "
        "(quarantined, abandoned, or removed). Bring one back, or pass --from-scratch to begin again at step 0"
    )


def begin_once(run: Folder, term: int, job: str) -> bool:
    """Call ``begin_from_scratch`` unless the same ``job`` has requested it before. Returns True if it was called.

    A launcher that restarts a lost group passes --from-scratch again, which must not discard the job's progress.
    """
    if job and job in leases.scratch_jobs(run):
        return False
    begin_from_scratch(run, term, job)
    return True


def begin_from_scratch(run: Folder, term: int, job: str = "") -> list[str]:
    """Have the run begin again at step 0 under lease ``term``. ``job``: name of the job that requests it, if it has one.

    Returns the checkpoints that a restore could use until now. They are marked as abandoned, oldest first, and retention
    removes them as new checkpoints are committed. If this is interrupted, the run still resumes from the newest one.
    """
    older = committed(run)
    abandon(run, older, "the run was begun again with --from-scratch", term)
    leases.note_scratch(run, term, job)
    return older


# Checkpoints that were trained in another data order than the current one of the run.


def of_another_order(run: Folder, meta: Meta, identity: Identity) -> str:
    """Return an error text if a checkpoint was trained in another data order than this run's; empty if not."""
    wanted = identity(meta.step)
    if meta.order_identity == wanted:
        return ""
    return (
        f"checkpoint {name_of(meta.step)} of {run.url} was trained in the order {meta.order_identity}, this run has "
        f"{wanted}: another dataset, other labels, another seed, batch, lanes or window, or other weights or skips of steps "
        "that are done; use those that it was trained with, or a new run.id"
    )


def newer_of_other_orders(run: Folder, identity: Identity, go_back: bool) -> list[str] | None:
    """Return the checkpoints that are newer than the newest checkpoint of this run's data order, newest first.

    Returns None if there are checkpoints, but none of this run's order. Without ``go_back``, raises CheckpointError if the
    newest checkpoint is of another order.
    """
    others: list[str] = []
    for name in reversed(committed(run)):
        try:
            meta = read_manifest(run, name).meta
        except CheckpointError:
            continue  # a bad checkpoint: the restore will quarantine it
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
    """Mark the checkpoints that ``newer_of_other_orders`` returns as abandoned by lease ``term``; their bytes are kept. Returns
    False, and marks nothing, if no checkpoint is of this run's order. Raises as ``newer_of_other_orders`` does."""
    others = newer_of_other_orders(run, identity, go_back)
    if others:
        abandon(run, others, "the run resumed from an older checkpoint in another data order", term)
    return others is not None
