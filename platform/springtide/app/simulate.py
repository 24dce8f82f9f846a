"""Simulates a run on a record of spot capacity, with the policy of real training, and training with checkpoints only."""

from __future__ import annotations

import dataclasses
from typing import Any

from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs, checkpoint_restart, simulate
from springtide.elastic.traces import larger, read_file
from springtide.errors import ConfigError, explain

SAVES_S, RESTART_S = 600.0, 75.0
"""Save interval and restart time of training with checkpoints only [s]; the restart is that of plain Ray Train, measured by
benchmarks/recovery.py."""


def simulate_trace(trace: str, times: int, min_workers: int, costs: Costs) -> dict[str, Any]:
    """Simulate both on the record in file ``trace``, with ``times`` times the nodes. Raises ConfigError for a value out of
    range."""
    record = read_file(trace)
    limits: list[tuple[str, float, float]] = [("--times", times, 1), ("--min-workers", min_workers, 1)]
    limits += [("--step", costs.step_s, 1e-3), ("--restart", costs.restart_s, 0), ("--warm-up", costs.warm_up_s, 0)]
    for name, value, least in (*limits, ("--notice", costs.notice_s, 0)):
        if value < least:
            raise ConfigError(explain(name, value, f"is less than {least:g}", "give more"))
    record = larger(record, times) if times > 1 else record
    bounds = Bounds(min_workers, max(record.most, min_workers))
    ours = simulate(record, bounds, costs)
    theirs = checkpoint_restart(record, bounds, SAVES_S, RESTART_S)
    outcomes = {"springtide": ours, "checkpoint_restart": theirs}
    rows = {name: {"of_ideal": one.of_ideal, **dataclasses.asdict(one)} for name, one in outcomes.items()}
    return {"hours": record.end_s / 3600, "most_nodes": record.most, **rows}


def words(found: dict[str, Any]) -> str:
    """Return the result of ``simulate_trace`` as text."""
    ours, theirs = found["springtide"], found["checkpoint_restart"]
    others = f"a checkpoint every {SAVES_S / 60:.0f} minutes, {RESTART_S:.0f} s per restart"
    return f"""{found["hours"]:.1f} hours, at most {found["most_nodes"]} nodes; compared with a run that loses no time:
  {ours["of_ideal"]:6.1%}  springtide: {ours["restarts"]} restarts
  {theirs["of_ideal"]:6.1%}  {others}: {theirs["restarts"]} restarts
{ours["waiting_s"] / 3600:.1f} hours had too few nodes"""
