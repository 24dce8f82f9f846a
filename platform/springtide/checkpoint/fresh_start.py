"""Decide if a run may begin at step 0.

A run that never committed a checkpoint may begin at step 0. Any other run needs --from-scratch: if all its checkpoints were
quarantined, abandoned or removed, a person must check what was lost before everything is trained again.
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
    """Let the run begin again at step 0, but only once per ``job``. Returns True if the run begins again, False if ``job`` has
    already begun it again.

    ``job``: name of the job in the launcher; without a name, each call begins again. A launcher that restarts a crashed worker
    group passes --from-scratch again; this must not discard the progress of the job.
    """
    if job and job in leases.scratch_jobs(run):
        return False
    begin_from_scratch(run, term, job)
    return True


def begin_from_scratch(run: Folder, term: int, job: str = "") -> list[str]:
    """Let the run begin again at step 0: mark all usable checkpoints as abandoned, so that no restore loads them. Returns their
    names.

    ``term``: number of the lease (right to write the run) that begins again. ``job``: name of the job that requests it, if it
    has one. The newest checkpoint is marked last: if this call is interrupted, the run still resumes from it. Retention removes
    the abandoned checkpoints as new checkpoints are committed.
    """
    older = committed(run)
    abandon(run, older, "the run was begun again with --from-scratch", term)
    leases.note_scratch(run, term, job)
    return older


# Checkpoints that were trained in another data order than the run has now.


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

    An empty list if the newest checkpoint has this run's order, or if there is no checkpoint. None if all checkpoints have
    other orders, so that there is nothing to resume from. If the newest readable checkpoint has another order and ``go_back``
    is False, raises CheckpointError.
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
    """Let the run resume from the newest checkpoint of its data order: newer checkpoints of other orders are marked as
    abandoned, and their files stay. If all checkpoints have other orders, marks nothing and returns False. ``term``: number of
    the lease whose holder marks them. ``go_back`` and errors: as in ``newer_of_other_orders``."""
    others = newer_of_other_orders(run, identity, go_back)
    if others:
        abandon(run, others, "the run resumed from an older checkpoint in another data order", term)
    return others is not None
