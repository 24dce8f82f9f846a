"""Proof after the fact: did every step train on exactly the samples of the uninterrupted run?"""

from __future__ import annotations

from typing import Any

import yaml

from springtide.config import RUN_CONFIG, build
from springtide.shards import load_manifest
from springtide.store import Folder
from springtide.stream import digest, order_of
from springtide.track.events import Started, StepDone
from springtide.track.journal import read_journal


def verify(run: Folder) -> dict[str, Any]:
    """Recompute each step's digest from the order alone and compare it with what the ranks really consumed.

    Returns ``ok``, ``steps_checked``, ``steps_trained_again`` (after restarts; each is checked too), ``missing`` (steps the
    journal does not have), ``mismatches`` (step, expected, found; the first ten), ``order_identity``, and
    ``loss_max_abs_diff`` between the tries of steps that were trained more than once.
    """
    config = build(yaml.safe_load(run.read(RUN_CONFIG)))
    order = order_of(config, load_manifest(Folder(config.shards.dataset)))
    events = read_journal(run)
    tries: dict[int, list[StepDone]] = {}
    for event in events:
        if isinstance(event, StepDone):
            tries.setdefault(event.step, []).append(event)
    mismatches = []
    for step, done in tries.items():
        expected = f"{digest(order.batch(step - 1)):016x}"
        mismatches += [
            {"step": step, "expected": expected, "found": one.digest} for one in done if one.digest != expected
        ]
    missing = [step for step in range(1, max(tries, default=0) + 1) if step not in tries]
    identities = {event.order_identity for event in events if isinstance(event, Started)}
    spread = [max(one.loss for one in done) - min(one.loss for one in done) for done in tries.values() if len(done) > 1]
    return {
        "ok": bool(tries) and not mismatches and not missing and identities <= {order.identity},
        "run": run.url,
        "order_identity": order.identity,
        "steps_checked": len(tries),
        "steps_trained_again": sum(len(done) - 1 for done in tries.values()),
        "loss_max_abs_diff": max(spread, default=0.0),
        "world_sizes": sorted({one.world_size for done in tries.values() for one in done}),
        "missing": missing[:10],
        "mismatches": mismatches[:10],
    }
