"""Store in each checkpoint the last step at which a comparison found that all devices compute the same results.

If a device turns out to compute wrong results, the run goes back to that step. Checkpoints of later steps are marked as
abandoned: no restore uses them.
"""

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
    """Return an entry for ``Meta.components`` with ``step``, the last step at which all devices computed the same results. An
    empty dict if ``step`` is None."""
    return {} if step is None else {_COMPONENT: {_FIELD: step}}


def agreed_step(meta: Meta) -> StepsDone | None:
    """Return the last step before this save at which a comparison found the same results on all devices. None if devices were
    never compared."""
    found = meta.components.get(_COMPONENT)
    step = found.get(_FIELD) if isinstance(found, dict) else None
    return StepsDone(step) if isinstance(step, int) and 0 <= step <= meta.step else None


def good_until(meta: Meta, term: int, gone_back: Sequence[tuple[int, StepsDone]]) -> StepsDone | None:
    """Return the last step of a saved state that is known to be good: up to it, all devices computed the same results. None if
    no step is known to be good.

    ``meta``: metadata of the state, which the holder of lease number ``term`` saved. ``gone_back``: from ``leases.gone_back``.
    A lease goes back to a step only if all devices agreed at that step. So if an older lease saved the state at or before that
    step, the state is good, even if its own metadata record only an earlier agreement.
    """
    if any(term < later and meta.step <= step for later, step in gone_back):
        return meta.step
    return agreed_step(meta)


def abandon_after(run: Folder, step: StepsDone, reason: str, term: int) -> list[str]:
    """Mark the checkpoints after ``step`` as abandoned, so that no restore uses them. Returns their names. ``term``: number of
    the lease (right to write the run) that marks them."""
    suspects = [name for name in committed(run) if (step_of(name) or 0) > step]
    abandon(run, suspects, f"saved after step {step}, when all devices last agreed: {reason}", term)
    return suspects


def counting(run: Folder, found: Sequence[SnapshotPart]) -> list[SnapshotPart]:
    """Return the parts in ``found`` that may be restored. A part is one rank's share of a snapshot (state in the memory of
    nodes).

    Parts that were saved before the run last began at step 0, or before its last rollback, are dropped. If a lease returned the
    run to an earlier step, because a device had computed wrong results, later steps that older leases saved are dropped too.
    """
    oldest, gone_back = leases.snapshots_since(run), leases.gone_back(run)
    return [
        one
        for one in found
        if one.term >= oldest and all(one.term >= term or one.meta.step <= step for term, step in gone_back)
    ]
