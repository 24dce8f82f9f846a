"""Simulate a run on a record of spot capacity, or on a cluster with random failures, with the policy of real training. Training
with checkpoints only is simulated for comparison."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

from springtide.elastic.group_sizes import speed
from springtide.elastic.market import (
    Deadline,
    MarketOutcome,
    always_full,
    never,
    simulate_market,
    uniform_progress,
    until_the_last,
    without_spot,
)
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import (
    Costs,
    SimulationResult,
    TunedBaseline,
    checkpoint_restart,
    simulate,
    tuned_checkpoint_restart,
)
from springtide.elastic.traces import FailureRates, Trace, larger, poisson_failures, read
from springtide.errors import ConfigError, explain
from springtide.tracking.ledger import Prices

SAVES_S, RESTART_S = 600.0, 75.0
"""Save interval and restart time of training with checkpoints only, the baseline [s]. The restart time was measured with plain
Ray Train by benchmarks/recovery.py."""
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
"""Field of ``Costs`` -> its command-line option and its minimum."""
_MOST_FAILURES = 1e6


@dataclasses.dataclass(frozen=True)
class TraceResult:
    """Three simulated runs on one record of spot capacity or failures: springtide's run, and two baselines with checkpoints
    only."""

    hours: float
    """Length of the record [h]."""
    most_nodes: int
    """Largest number of nodes at one time."""
    unknown_h: float
    """Total time in gaps of the record [h]. Within a gap, the number of nodes is assumed not to change."""
    springtide: SimulationResult
    """The run with springtide's policy, as in real training."""
    checkpoint_restart: SimulationResult
    """A baseline with a checkpoint every 10 minutes: every loss of a node costs the work since the last checkpoint."""
    tuned: TunedBaseline
    """A baseline with checkpoints at the save interval that is best for this record. Its restarts take as long as
    springtide's."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, as ``springtide plan --trace FILE --json`` prints it."""
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
    """Return a line of text about the gaps of a record of spot capacity; empty if it has no gaps.

    Args:
        unknown_h: total time in gaps [h].

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
    """Simulate a run, and two baselines with checkpoints only, on a record of spot capacity.

    Args:
        trace: path of the record: a trace of Bamboo or SkyPilot, or numbers of nodes by date or by hour.
        times: number of clusters that replay the record, each from a different start time; the nodes of a cluster may be lost
            together.
        min_workers: the run waits while there are fewer nodes.
        costs: durations and copies; a drill (a local run with real faults) measures them.
        lanes: fixed shares of a batch, as ``stream.lanes``; 0: a batch can be divided into any parts.

    Returns:
        Times and restarts of each run, and its productive time as a share of a run that loses no time.

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
    """Simulate a run, and two baselines with checkpoints only, on a reliable cluster, where nodes fail at random, without a
    notice, and are replaced.

    Args:
        nodes: number of nodes.
        days: length of the run [days].
        rates: rates and kinds of failures.
        min_workers: the run waits while there are fewer nodes.
        costs: durations and copies; ``notice_s`` is ignored.
        lanes: fixed shares of a batch, as ``stream.lanes``; 0: a batch can be divided into any parts.
        seed: random seed of the failures.

    Returns:
        Times and restarts of each run, as ``simulate_trace`` returns them.

    Raises:
        ConfigError: a value is out of range.

    Source:
        Published rates: The Llama 3 Herd of Models (2024), 419 unexpected interruptions in 54 days on 16,384 GPUs; Kokolis et
        al. (HPCA 2025), a failure every 7.9 h at 1,024 GPUs and, as projected, every 1.8 h at 16,384.

    Examples:
        >>> from springtide.planning.simulation import simulate_failures
        >>> from springtide.elastic.traces import FailureRates
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
    """Check that the assumed durations (``costs``) and further options of a simulation are in range.

    Args:
        costs: durations and copies.
        more: (name, value, minimum, maximum) of each further option.

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
                "--lanes", lanes, f"is less than the {record.most} nodes; each node needs a lane", "give more, or 0"
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


# Simulate a run with a deadline on recorded spot nodes, with on-demand nodes as a fallback, and compute its cost.

_RULES = {
    "uniform_progress": uniform_progress,
    "until_the_last": until_the_last,
    "always_full": always_full,
    "spot": never,
}
_WORDS = {
    "uniform_progress": "uniform progress: on demand where the work is behind its line",
    "until_the_last": "spot only until the slack is used up, then on demand",
    "always_full": "on demand wherever spot is missing",
    "spot": "spot only",
    "on_demand": "on demand only",
}


class MarketRun(NamedTuple):
    """A simulated run with a deadline, and what its nodes cost."""

    outcome: MarketOutcome
    dollars: float

    @property
    def finish_h(self) -> float:
        """When the run's work was done; infinite if it was not done when the record ended [h]."""
        return self.outcome.finish_s / 3600


@dataclasses.dataclass(frozen=True)
class MarketResult:
    """Simulated runs with one deadline on one record, each with a different rule for on-demand nodes."""

    workers: int
    """Largest number of workers."""
    deadline_h: float
    """Deadline, from the start of the run [h]."""
    unknown_h: float
    """Total time in gaps of the record [h]. Within a gap, the number of nodes is assumed not to change."""
    runs: dict[str, MarketRun]
    """Name of a rule for on-demand nodes -> the run that used it."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, as ``springtide plan --deadline H --json`` prints it."""
        rows = {
            name: {
                "dollars": run.dollars,
                "finish_h": run.finish_h if math.isfinite(run.finish_h) else None,
                "in_time": run.finish_h <= self.deadline_h,
                "spot_node_h": run.outcome.spot_s / 3600,
                "on_demand_node_h": run.outcome.on_demand_s / 3600,
                "restarts": run.outcome.restarts,
            }
            for name, run in self.runs.items()
        }
        return {"workers": self.workers, "deadline_h": self.deadline_h, "unknown_h": self.unknown_h, **rows}

    def describe(self) -> str:
        """Return the result as text, a line for each rule for on-demand nodes."""
        lines = [f"{self.workers} workers, deadline after {self.deadline_h:.1f} hours:"]
        for name, run in self.runs.items():
            late = "" if run.finish_h <= self.deadline_h else "  TOO LATE"
            done = f"done after {run.finish_h:.1f} h" if math.isfinite(run.finish_h) else "not done"
            rented = f"{run.outcome.on_demand_s / 3600:.1f} node-hours on demand, {run.outcome.restarts} restarts"
            lines.append(f"  {run.dollars:10.2f} dollars  {_WORDS[name]}: {done}, {rented}{late}")
        return "\n".join(lines) + gaps(self.unknown_h)


def simulate_deadline(
    trace: str,
    deadline_h: float,
    work: float,
    prices: Prices,
    workers: int = 0,
    start_s: float = 180.0,
    times: int = 1,
    min_workers: int = 1,
    costs: Costs | None = None,
    lanes: int = 0,
) -> MarketResult:
    """Simulate a run with a deadline on a record of spot capacity, with on-demand nodes as a fallback.

    Args:
        trace: path of the record, as for ``simulate_trace``.
        deadline_h: when the work must be done, from the start of the record [h].
        work: training that the run needs [worker-hours].
        prices: prices of an on-demand node (``other``) and of a spot node.
        workers: largest number of workers, one per node; 0: the largest number of nodes in the record at one time.
        start_s: time from the order of an on-demand node until it joins [s].
        times: number of clusters that replay the record, each from a different start time.
        min_workers: the run waits while there are fewer nodes.
        costs: durations and copies; a drill (a local run with real faults) measures them.
        lanes: fixed shares of a batch, as ``stream.lanes``; 0: a batch can be divided into any parts.

    Returns:
        Cost and end time of the run whose work progresses evenly to the deadline (``uniform_progress``), and of four runs for
        comparison. Of these, one uses only on-demand nodes, one uses them in place of each missing spot node, one uses them
        once no spare time is left, and one uses only spot nodes.

    Raises:
        ConfigError: a value is out of range, the file is not a record or is too short, or no run can meet the deadline.

    Source:
        Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (NSDI 2024).

    Examples:
        >>> from springtide.planning.simulation import simulate_deadline
        >>> from springtide.tracking.ledger import Prices
        >>> found = simulate_deadline("trace.csv", deadline_h=0.9, work=1.2, prices=Prices(other=3.0, spot=1.0))
        >>> found.runs["uniform_progress"].finish_h <= 0.9
        True
        >>> found.runs["uniform_progress"].dollars < found.runs["on_demand"].dollars
        True
    """
    record, costs = read_trace(trace), costs or Costs()
    check(
        costs,
        ("--times", times, 1, math.inf),
        ("--deadline", deadline_h, 1e-3, math.inf),
        ("--work", work, 1e-3, math.inf),
        ("--order", start_s, 0, math.inf),
        ("--min-workers", min_workers, 1, math.inf),
        ("--nodes", workers, 0, math.inf),
    )
    _check_prices(prices)
    record = larger(record, times) if times > 1 else record
    workers = workers or record.most
    if not min_workers <= workers <= (lanes or workers):
        limit = f"is not from --min-workers ({min_workers})" + f" to --lanes ({lanes})" * bool(lanes)
        raise ConfigError(explain("--nodes", workers, limit, "give another number"))
    change_s = start_s + costs.warm_up_s + costs.restart_s
    loss_s = costs.restart_s + 2 * costs.step_s
    plan = Deadline(work * 3600, deadline_h * 3600, workers, change_s, loss_s, lanes)
    bounds = Bounds(min_workers, workers, lanes=lanes)
    alone = simulate_market(_forever(record), bounds, costs, plan, always_full, start_s)
    _check_deadline(plan, alone, prices)
    if record.end_s < plan.deadline_s:
        limit = f"is later than the end of the record, after {record.end_s / 3600:g} h"
        raise ConfigError(explain("--deadline", deadline_h, limit, "give an earlier deadline, or a longer record"))
    found = {name: simulate_market(record, bounds, costs, plan, rule, start_s) for name, rule in _RULES.items()}
    runs = {name: MarketRun(one, _dollars(one, prices)) for name, one in (found | {"on_demand": alone}).items()}
    return MarketResult(workers, deadline_h, record.unknown_s / 3600, runs)


def _forever(record: Trace) -> Trace:
    return dataclasses.replace(without_spot(record), end_s=math.inf)


def _dollars(found: MarketOutcome, prices: Prices) -> float:
    return (found.on_demand_s * prices.other + found.spot_s * prices.spot) / 3600


def _check_prices(prices: Prices) -> None:
    for option, price in (("--price", prices.other), ("--spot-price", prices.spot)):
        if not 0 < price < math.inf:
            limit = "is missing, and a cost has no other source" if not price else "is not a price above 0"
            raise ConfigError(explain(option, price, limit, "give the price of a node in dollars per hour"))
    if prices.spot >= prices.other:
        limit = f"is not less than --price ({prices.other:g})"
        raise ConfigError(explain("--spot-price", prices.spot, limit, "use on-demand nodes only, or a lower price"))


def _check_deadline(plan: Deadline, alone: MarketOutcome, prices: Prices) -> None:
    """Raise ConfigError if even a run on on-demand nodes alone misses the deadline. The message has alternatives and their
    costs."""
    if alone.finish_s <= plan.deadline_s:
        return
    hours = math.ceil(alone.finish_s / 36) / 100
    first_s = alone.finish_s - plan.work / speed(plan.lanes, plan.workers)
    remedy = f"give at least {hours:g} ({_dollars(alone, prices):.2f} dollars)"
    left_s = plan.deadline_s - first_s
    more = math.ceil(plan.work / left_s) if left_s > 0 else 0
    if more and not plan.lanes:
        remedy += f", or --nodes {more} ({more * plan.deadline_s / 3600 * prices.other:.2f} dollars)"
    limit = f"cannot be met: {plan.workers} nodes on demand from the start take {alone.finish_s / 3600:.2f} h"
    raise ConfigError(explain("--deadline", plan.deadline_s / 3600, limit, remedy))
