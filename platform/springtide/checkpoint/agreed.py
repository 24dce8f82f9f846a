"""The last agreement of all devices, which checkpoints carry: states after it are abandoned if a device turns out wrong."""

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
    """Return ``Meta.components`` for an agreement at ``step``; empty for None."""
    return {} if step is None else {_COMPONENT: {_FIELD: step}}


def agreed_step(meta: Meta) -> StepsDone | None:
    """Return the steps done when all devices last agreed before this state was saved; None if they were not checked."""
    found = meta.components.get(_COMPONENT)
    step = found.get(_FIELD) if isinstance(found, dict) else None
    return StepsDone(step) if isinstance(step, int) and 0 <= step <= meta.step else None


def good_until(meta: Meta, term: int, gone_back: Sequence[tuple[int, StepsDone]]) -> StepsDone | None:
    """Return until which step a state is good that lease ``term`` saved. ``gone_back``: see ``leases.gone_back``: what older
    leases had saved until that step was checked, although after it was saved."""
    if any(term < later and meta.step <= step for later, step in gone_back):
        return meta.step
    return agreed_step(meta)


def abandon_after(run: Folder, step: StepsDone, reason: str, term: int) -> list[str]:
    """Mark the checkpoints after ``step`` as abandoned by lease ``term``. Returns their names."""
    suspects = [name for name in committed(run) if (step_of(name) or 0) > step]
    abandon(run, suspects, f"saved after step {step}, when all devices last agreed: {reason}", term)
    return suspects


def counting(run: Folder, found: Sequence[SnapshotPart]) -> list[SnapshotPart]:
    """Return the parts of snapshots that still count: not from before a fresh start or a rollback, nor of a device that was
    wrong."""
    oldest, gone_back = leases.snapshots_since(run), leases.gone_back(run)
    return [
        one
        for one in found
        if one.term >= oldest and all(one.term >= term or one.meta.step <= step for term, step in gone_back)
    ]
