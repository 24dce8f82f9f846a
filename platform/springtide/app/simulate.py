"""Simulates a run on a record of spot capacity, with the policy of real training, and training with checkpoints only."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs, SimulationResult, checkpoint_restart, simulate
from springtide.elastic.traces import Trace, larger, read
from springtide.errors import ConfigError, explain

SAVES_S, RESTART_S = 600.0, 75.0
"""Save interval and restart time of training with checkpoints only [s]; the restart is that of plain Ray Train, measured by
benchmarks/recovery.py."""
_COSTS = Costs()


@dataclasses.dataclass(frozen=True)
class TraceResult:
    """Two simulated runs on one record of spot capacity."""

    hours: float
    """Length of the record [h]."""
    most_nodes: int
    """Largest number of nodes at one time."""
    springtide: SimulationResult
    """The run with the policy of real training."""
    checkpoint_restart: SimulationResult
    """The run with checkpoints only: every loss costs the time since the last one."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, as ``springtide simulate --json`` prints it."""
        runs = {"springtide": self.springtide, "checkpoint_restart": self.checkpoint_restart}
        rows = {name: {"of_ideal": one.of_ideal, **dataclasses.asdict(one)} for name, one in runs.items()}
        return {"hours": self.hours, "most_nodes": self.most_nodes, **rows}

    def describe(self) -> str:
        """Return the result as text of four lines."""
        ours, theirs = self.springtide, self.checkpoint_restart
        others = f"a checkpoint every {SAVES_S / 60:.0f} minutes, {RESTART_S:.0f} s per restart"
        return f"""{self.hours:.1f} hours, at most {self.most_nodes} nodes; compared with a run that loses no time:
  {ours.of_ideal:6.1%}  springtide: {ours.restarts} restarts
  {theirs.of_ideal:6.1%}  {others}: {theirs.restarts} restarts
{ours.waiting_s / 3600:.1f} hours had too few nodes"""


def read_trace(path: str) -> Trace:
    """Read the record of spot capacity in a file. Raises ConfigError if it cannot be read or is not in a known format."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(explain("--trace", path, f"cannot be read: {error}", "give a text file")) from None
    return read(text, path)


def simulate_trace(trace: str, times: int = 1, min_workers: int = 1, costs: Costs = _COSTS) -> TraceResult:
    """Simulate both runs on a record of spot capacity.

    Args:
        trace: path of the record: a trace of Bamboo or SkyPilot, dated numbers, or hours and numbers.
        times: number of clusters, each at another offset of the record.
        min_workers: the run waits while there are fewer nodes.
        costs: duration of a step, of a restart, of a start and of a notice [s]; measure them with a drill.

    Returns:
        What each run made of the nodes, and its part of a run that loses no time.

    Raises:
        ConfigError: a value is out of range, or the file is not a record.

    Source:
        The records: Bamboo (Thorpe et al., NSDI 2023), Can't Be Late (Wu et al., NSDI 2024).

    Examples:
        >>> from springtide.app.simulate import simulate_trace
        >>> found = simulate_trace("trace.csv")
        >>> found.hours, found.most_nodes, found.springtide.restarts
        (1.0, 2, 1)
        >>> found.springtide.of_ideal > found.checkpoint_restart.of_ideal
        True
    """
    record = read_trace(trace)
    limits: list[tuple[str, float, float]] = [("--times", times, 1), ("--min-workers", min_workers, 1)]
    limits += [("--step", costs.step_s, 1e-3), ("--restart", costs.restart_s, 0), ("--warm-up", costs.warm_up_s, 0)]
    for name, value, least in (*limits, ("--notice", costs.notice_s, 0)):
        if value < least:
            raise ConfigError(explain(name, value, f"is less than {least:g}", "give more"))
    record = larger(record, times) if times > 1 else record
    bounds = Bounds(min_workers, max(record.most, min_workers))
    return TraceResult(
        hours=record.end_s / 3600,
        most_nodes=record.most,
        springtide=simulate(record, bounds, costs),
        checkpoint_restart=checkpoint_restart(record, bounds, SAVES_S, RESTART_S),
    )
