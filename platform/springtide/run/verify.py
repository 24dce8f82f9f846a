"""Checks afterwards that every step trained on exactly the samples of the uninterrupted run."""

from __future__ import annotations

from typing import Any

from springtide.checkpoint import branch
from springtide.config import RUN_CONFIG, parse
from springtide.config.steps import StepsDone, one_more
from springtide.events import Started, StepDone
from springtide.store import Folder
from springtide.stream import digest, open_data
from springtide.track.journal import read_journal


def verify(run: Folder) -> dict[str, Any]:
    """Recompute each step's digest from the order alone and compare it with the samples that the ranks consumed.

    Returns ``ok``, ``steps_checked``, ``steps_trained_again`` (after restarts; each is checked too), ``missing`` (steps that
    the journal lacks; the first ten), ``mismatches`` (step, expected, found; the first ten), ``order_identity``, and
    ``loss_max_abs_diff`` between the tries of steps that were trained more than once. A try in an order that was abandoned
    later, by skipping steps that were done, counts only as ``steps_abandoned``. ``corpora``: rows and epochs of each so far.
    """
    config = parse(run.read(RUN_CONFIG))
    data = open_data(config)
    events = read_journal(run)
    tries: dict[StepsDone, list[tuple[str, StepDone]]] = {}
    identity = ""
    for event in events:
        if isinstance(event, Started):
            identity = event.order_identity
        elif isinstance(event, StepDone):
            tries.setdefault(event.step, []).append((identity, event))
    mismatches, checked = [], {}
    for step, done in tries.items():
        expected = f"{digest(data.order.batch(data.order.step_before(step))):016x}"
        # a try in another order was abandoned when the step was trained again; the model learned the last one
        counted = [one for place, (order, one) in enumerate(done) if order == done[-1][0] or place == len(done) - 1]
        checked[step] = counted
        mismatches += [
            {"step": step, "expected": expected, "found": one.digest} for one in counted if one.digest != expected
        ]
    first, last = one_more(branch.first_step(config.train)), max(tries, default=StepsDone(0))
    missing = [step for step in range(first, last + 1) if step not in tries]
    spread = [max(one.loss for one in done) - min(one.loss for one in done) for done in checked.values()]
    return {
        "ok": bool(tries) and not mismatches and not missing,
        "run": run.url,
        "order_identity": data.order.identity,
        "steps_checked": len(tries),
        "steps_trained_again": sum(len(done) - 1 for done in tries.values()),
        "steps_abandoned": sum(len(tries[step]) - len(done) for step, done in checked.items()),
        "loss_max_abs_diff": max(spread, default=0.0),
        "world_sizes": sorted({one.world_size for done in checked.values() for one in done}),
        "corpora": data.drawn(last),
        "missing": missing[:10],
        "mismatches": mismatches[:10],
    }
