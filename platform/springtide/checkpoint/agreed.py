"""The last step at which all devices agreed: a comparison found that they compute the same results. Each checkpoint stores it.
If a device turns out to compute wrong results, states after that step are abandoned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from springtide.checkpoint import leases
from springtide.checkpoint.format import Meta, abandon, committed, step_of
from springtide.checkpoint.snapshot_parts import SnapshotPart
from springtide.config.steps import StepsDone
from springtide.storage import Folder

_COMPONENT, _FIELD = "recheck", "agreed_step"


def components_of(step: StepsDone | None) -> dict[str, Any]:
    """Return the entry of ``Meta.components`` that stores ``step``, at which all devices agreed; empty for None."""
    return {} if step is None else {_COMPONENT: {_FIELD: step}}


def agreed_step(meta: Meta) -> StepsDone | None:
    """Return the steps done when all devices last computed the same results, before this state was saved; None if the devices
    were never compared."""
    found = meta.components.get(_COMPONENT)
    step = found.get(_FIELD) if isinstance(found, dict) else None
    return StepsDone(step) if isinstance(step, int) and 0 <= step <= meta.step else None


def good_until(meta: Meta, term: int, gone_back: Sequence[tuple[int, StepsDone]]) -> StepsDone | None:
    """Return the last step up to which a state that lease ``term`` saved is known to be good; None if it is unknown.

    ``gone_back``: from ``leases.gone_back``. A lease that went back to a step shows that all devices agreed at that step. So
    states that older leases saved up to that step are good, although their metadata do not contain this later agreement.
    """
    if any(term < later and meta.step <= step for later, step in gone_back):
        return meta.step
    return agreed_step(meta)


def abandon_after(run: Folder, step: StepsDone, reason: str, term: int) -> list[str]:
    """Mark the checkpoints after ``step`` as abandoned, under lease ``term``. Returns their names."""
    suspects = [name for name in committed(run) if (step_of(name) or 0) > step]
    abandon(run, suspects, f"saved after step {step}, when all devices last agreed: {reason}", term)
    return suspects


def counting(run: Folder, found: Sequence[SnapshotPart]) -> list[SnapshotPart]:
    """Return the snapshot parts in ``found`` that may be restored. Parts from before a fresh start or a rollback may not. Nor
    may later parts of older leases if a newer lease went back to an earlier step because a device had computed wrong
    results."""
    oldest, gone_back = leases.snapshots_since(run), leases.gone_back(run)
    return [
        one
        for one in found
        if one.term >= oldest and all(one.term >= term or one.meta.step <= step for term, step in gone_back)
    ]
