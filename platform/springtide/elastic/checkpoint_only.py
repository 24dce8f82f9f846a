"""Simulate training with checkpoints only, for comparison: a loss costs all work since the last checkpoint, and a restart."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from springtide.elastic.evenness import evenness
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import SimulationResult, timeline
from springtide.elastic.traces import Trace

CADENCES_S = (30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Save intervals that are tried for the best one [s]."""


class TunedBaseline(NamedTuple):
    """Training with checkpoints only at its best save interval."""

    every_s: float
    result: SimulationResult


def checkpoint_restart(
    trace: Trace, bounds: Bounds, every_s: float, restart_s: float, save_s: float = 0.0
) -> SimulationResult:
    """Simulate training with checkpoints only. It saves every ``every_s``, and a save takes ``save_s`` of training. It restarts
    on all nodes at every loss, and at the next checkpoint if there are more nodes. A new process costs nothing here."""
    outcome, now, here = SimulationResult(), 0.0, frozenset[str]()
    group, trains_from, trains = frozenset[str](), math.inf, every_s / (every_s + save_s)
    events = [event for event in timeline(trace, 0.0) if event[1] != "hang"]
    for time_s, what, nodes in [*events, (trace.end_s, "end", ())]:
        workers, even = len(group), evenness(bounds.lanes, len(group)) if group else 1.0
        while now < time_s:
            grows = bool(group) and len(group) < bounds.feasible(len(here))
            saved = trains_from + every_s * (math.floor(max(0.0, now - trains_from) / every_s + 1e-9) + 1)
            until = min(time_s, saved) if grows else time_s
            trained_s = max(0.0, until - max(now, trains_from))
            outcome.possible += bounds.feasible(len(here)) * (until - now)
            outcome.productive += trained_s * trains * even * workers
            outcome.uneven += trained_s * trains * (1 - even) * workers
            outcome.saving += trained_s * (1 - trains) * workers
            outcome.restarting += (until - now - trained_s) * workers
            outcome.waiting_s += (until - now) * (not group)
            now = until
            if grows and now == saved:
                group, trains_from = _largest(bounds, here), now + restart_s
                workers, even = len(group), evenness(bounds.lanes, len(group))
                outcome.restarts += 1
        here = here | {*nodes} if what == "join" else here - {*nodes}
        if not group <= here or not group:
            lost = max(0.0, now - trains_from) % every_s * trains * workers if group else 0.0
            outcome.productive -= lost * even
            outcome.uneven -= lost * (1 - even)
            outcome.recomputed += lost
            outcome.restarts += bool(group)
            group = _largest(bounds, here)
            trains_from = now + restart_s if group else math.inf
    return outcome


def tuned_checkpoint_restart(trace: Trace, bounds: Bounds, restart_s: float, save_s: float) -> TunedBaseline:
    """Simulate training with checkpoints only at the best of ``CADENCES_S`` for this trace. Nobody knows it in advance."""
    found = [
        TunedBaseline(every_s, checkpoint_restart(trace, bounds, every_s, restart_s, save_s)) for every_s in CADENCES_S
    ]
    return max(found, key=lambda one: one.result.productive)


def _largest(bounds: Bounds, here: Collection[str]) -> frozenset[str]:
    return frozenset(sorted(here)[: bounds.feasible(len(here))])
