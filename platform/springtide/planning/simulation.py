"""Simulates a run on a record of spot capacity, or on a cluster that fails now and then, with the policy of real training, and
training with checkpoints only."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from springtide.elastic.checkpoint_only import TunedBaseline, checkpoint_restart, tuned_checkpoint_restart
from springtide.elastic.failures import FailureRates, poisson_failures
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs, SimulationResult, simulate
from springtide.elastic.traces import Trace, larger, read
from springtide.errors import ConfigError, explain

SAVES_S, RESTART_S = 600.0, 75.0
"""Save interval and restart time of training with checkpoints only [s]; the restart is that of plain Ray Train, measured by
benchmarks/recovery.py."""
_COSTS = Costs()
_LEAST: dict[str, tuple[str, float]] = {
    "step_s": ("--step", 1e-3),
    "restart_s": ("--restart", 0),
    "warm_up_s": ("--warm-up", 0),
    "notice_s": ("--notice", 0),
    "copies": ("--copies", 0),
    "store_every_s": ("--store-every", 1e-3),
    "save_s": ("--save", 0),
    "replica_shards": ("--replica-shards", 0),
    "hang_s": ("--hang", 0),
}
"""Cost -> its option, and the least it may be."""
_MOST_FAILURES = 1e6


@dataclasses.dataclass(frozen=True)
class TraceResult:
    """Three simulated runs on one record."""

    hours: float
    """Length of the record [h]."""
    most_nodes: int
    """Largest number of nodes at one time."""
    unknown_h: float
    """Time in gaps of the record, where the number of nodes before the gap is assumed [h]."""
    springtide: SimulationResult
    """The run with the policy of real training."""
    checkpoint_restart: SimulationResult
    """The run with checkpoints only, as is usual: every loss costs the time since the last one."""
    tuned: TunedBaseline
    """The same at the restart time of ``springtide`` and at the save interval that is best for this record."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, as ``springtide simulate --json`` prints it."""
        runs = {
            "springtide": self.springtide,
            "checkpoint_restart": self.checkpoint_restart,
            "tuned": self.tuned.result,
        }
        rows = {name: {"of_ideal": one.of_ideal, **dataclasses.asdict(one)} for name, one in runs.items()}
        rows["tuned"]["every_s"] = self.tuned.every_s
        return {"hours": self.hours, "most_nodes": self.most_nodes, "unknown_h": self.unknown_h, **rows}

    def describe(self) -> str:
        """Return the result as text of a few lines."""
        ours, theirs, tuned = self.springtide, self.checkpoint_restart, self.tuned
        usual = f"a checkpoint every {SAVES_S / 60:.0f} minutes, {RESTART_S:.0f} s per restart"
        best = f"a checkpoint every {tuned.every_s:.0f} s, the best interval, at springtide's time per restart"
        names = ("recomputed", "restarting", "uneven", "saving", "hanging")
        spent = ", ".join(f"{name} {getattr(ours, name) / (ours.possible or 1.0):.1%}" for name in names)
        return f"""{self.hours:.1f} hours, at most {self.most_nodes} nodes; compared with a run that loses no time:
  {ours.of_ideal:6.1%}  springtide: {ours.restarts} restarts, snapshots lost {ours.lost_memory} times
  {theirs.of_ideal:6.1%}  {usual}: {theirs.restarts} restarts
  {tuned.result.of_ideal:6.1%}  {best}: {tuned.result.restarts} restarts
what springtide's workers did else: {spent}
{ours.waiting_s / 3600:.1f} hours had too few nodes{gaps(self.unknown_h)}"""


def gaps(unknown_h: float) -> str:
    """Return a line about the gaps of a record; empty if there are none.

    Args:
        unknown_h: time in gaps [h].

    Examples:
        >>> gaps(0.0), gaps(2.0)
        ('', '\\nthe record says nothing about 2.0 hours: the number of nodes before each gap is assumed')
    """
    line = f"\nthe record says nothing about {unknown_h:.1f} hours: the number of nodes before each gap is assumed"
    return line if unknown_h else ""


def read_trace(path: str) -> Trace:
    """Read the record of spot capacity in a file. Raises ConfigError if it cannot be read or is not in a known format."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(explain("--trace", path, f"cannot be read: {error}", "give a text file")) from None
    return read(text, path)


def simulate_trace(
    trace: str, times: int = 1, min_workers: int = 1, costs: Costs = _COSTS, lanes: int = 0
) -> TraceResult:
    """Simulate runs on a record of spot capacity.

    Args:
        trace: path of the record: a trace of Bamboo or SkyPilot, dated numbers, or hours and numbers.
        times: number of clusters, each at another offset of the record, and each a failure domain.
        min_workers: the run waits while there are fewer nodes.
        costs: durations and copies; measure them with a drill.
        lanes: of a step, as ``stream.lanes``; 0: work is dealt in any parts.

    Returns:
        What each run made of the nodes, and its part of a run that loses no time.

    Raises:
        ConfigError: a value is out of range, or the file is not a record.

    Source:
        The records: Bamboo (Thorpe et al., NSDI 2023), Can't Be Late (Wu et al., NSDI 2024).

    Examples:
        >>> from springtide.planning.simulation import simulate_trace
        >>> found = simulate_trace("trace.csv")
        >>> found.hours, found.most_nodes, found.springtide.restarts
        (1.0, 2, 1)
        >>> found.springtide.of_ideal > found.checkpoint_restart.of_ideal
        True
    """
    record = read_trace(trace)
    check(costs, ("--times", times, 1, math.inf))
    return _simulate(larger(record, times) if times > 1 else record, min_workers, costs, lanes)


def simulate_failures(
    nodes: int,
    days: float,
    rates: FailureRates,
    min_workers: int = 1,
    costs: Costs = _COSTS,
    lanes: int = 0,
    seed: int = 0,
) -> TraceResult:
    """Simulate runs on a reliable cluster: now and then nodes fail, without a notice, and are replaced.

    Args:
        nodes: number of nodes.
        days: length of the run [days].
        rates: how often something fails, and what.
        min_workers: the run waits while there are fewer nodes.
        costs: durations and copies; ``notice_s`` does not count.
        lanes: of a step, as ``stream.lanes``; 0: work is dealt in any parts.
        seed: of the failures.

    Returns:
        As ``simulate_trace``.

    Raises:
        ConfigError: a value is out of range.

    Source:
        Published rates: The Llama 3 Herd of Models (2024), 419 unexpected interruptions in 54 days on 16,384 GPUs; Kokolis et
        al. (HPCA 2025), a failure every 7.9 h at 1,024 GPUs and, as projected, every 1.8 h at 16,384.

    Examples:
        >>> from springtide.planning.simulation import simulate_failures
        >>> from springtide.elastic.failures import FailureRates
        >>> found = simulate_failures(nodes=128, days=7, rates=FailureRates(mttf_s=7.9 * 3600))
        >>> found.springtide.restarts > 0, found.springtide.of_ideal > 0.99
        (True, True)
    """
    shares = rates.hangs + rates.racks
    check(
        costs,
        ("--nodes", nodes, 1, math.inf),
        ("--days", days, 1e-3, math.inf),
        ("--mttf", rates.mttf_s / 3600, 1e-3, math.inf),
        ("--spare", rates.spare_s, 0, math.inf),
        ("--hangs", rates.hangs, 0, 1),
        ("--racks", rates.racks, 0, 1),
        ("--hangs and --racks together", shares, 0, 1),
        ("--days over --mttf, in failures", days * 86400 / max(rates.mttf_s, 1e-3), 0, _MOST_FAILURES),
    )
    record = poisson_failures(nodes, days * 86400, rates, seed)
    return _simulate(record, min_workers, costs._replace(notice_s=0.0), lanes)


def check(costs: Costs, *more: tuple[str, float, float, float]) -> None:
    """Check that costs are in range, and more options.

    Args:
        costs: durations and copies.
        more: for each further option its name, value, and the least and the most that it may be.

    Raises:
        ConfigError: a value is out of range.

    Examples:
        >>> check(Costs(), ("--times", 0, 1, math.inf))
        Traceback (most recent call last):
        springtide.errors.ConfigError: --times = 0: is not a number of at least 1; give another
    """
    limits = [(option, getattr(costs, field), least, math.inf) for field, (option, least) in _LEAST.items()]
    for option, value, least, most in (*limits, *more):
        if not (math.isfinite(value) and least <= value <= most):
            limit = f"is not a number of at least {least:g}" + f" and at most {most:g}" * (most < math.inf)
            raise ConfigError(explain(option, value, limit, "give another"))


def _simulate(record: Trace, min_workers: int, costs: Costs, lanes: int) -> TraceResult:
    if min_workers < 1:
        raise ConfigError(explain("--min-workers", min_workers, "is less than 1", "give more"))
    if lanes and lanes < record.most:
        raise ConfigError(
            explain(
                "--lanes", lanes, f"is less than the {record.most} nodes, and a worker needs a lane", "give more, or 0"
            )
        )
    bounds = Bounds(min_workers, max(record.most, min_workers), lanes=lanes)
    return TraceResult(
        hours=record.end_s / 3600,
        most_nodes=record.most,
        unknown_h=record.unknown_s / 3600,
        springtide=simulate(record, bounds, costs),
        checkpoint_restart=checkpoint_restart(record, bounds, SAVES_S, RESTART_S),
        tuned=tuned_checkpoint_restart(record, bounds, costs.restart_s, costs.save_s),
    )
