"""Checkpoints that were trained in another data order than the run has now."""

from __future__ import annotations

from springtide.checkpoint.format import Identity, Meta, abandon, committed, name_of, read_manifest
from springtide.errors import CheckpointError
from springtide.storage import Folder


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
