"""Simulates a run that must be done by a deadline, on recorded spot nodes with on-demand nodes as a fallback, and its cost."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from springtide.elastic.evenness import speed
from springtide.elastic.market import Deadline, always_full, never, uniform_progress, until_the_last
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs
from springtide.elastic.simulate_market import MarketOutcome, simulate_market, without_spot
from springtide.elastic.traces import Trace, larger
from springtide.errors import ConfigError, explain
from springtide.planning.simulation import check, gaps, read_trace
from springtide.tracking.ledger import Prices

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
    """A simulated run, and what it cost."""

    outcome: MarketOutcome
    dollars: float

    @property
    def finish_h(self) -> float:
        """When its work was done; infinite if it was not done when the record ended [h]."""
        return self.outcome.finish_s / 3600


@dataclasses.dataclass(frozen=True)
class MarketResult:
    """Simulated runs with one deadline on one record, each with another rule for on-demand nodes."""

    workers: int
    """Most workers."""
    deadline_h: float
    """Deadline [h]."""
    unknown_h: float
    """Time in gaps of the record, where the number of nodes before the gap is assumed [h]."""
    runs: dict[str, MarketRun]
    """Rule -> run."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, as ``springtide simulate --deadline H --json`` prints it."""
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
        """Return the result as text, a line for each rule."""
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
        prices: of an on-demand node (``other``) and of a spot node.
        workers: most workers, one per node; 0: as many as the record has nodes at one time.
        start_s: time from the order of an on-demand node until it is there [s].
        times: number of clusters, as for ``simulate_trace``.
        min_workers: the run waits while there are fewer nodes.
        costs: durations and copies; measure them with a drill.
        lanes: of a step, as ``stream.lanes``; 0: work is dealt in any parts.

    Returns:
        The cost and the end of the run with uniform progress, and of others that rent on demand only, always, late or never.

    Raises:
        ConfigError: a value is out of range, the file is not a record or too short, or no run can meet the deadline.

    Source:
        Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (NSDI 2024).

    Examples:
        >>> from springtide.planning.market_simulation import simulate_deadline
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
        raise ConfigError(explain("--deadline", deadline_h, limit, "give less, or a longer record"))
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
            raise ConfigError(explain(option, price, limit, "give the dollars per node and hour, as track has them"))
    if prices.spot >= prices.other:
        limit = f"is not less than --price ({prices.other:g})"
        raise ConfigError(explain("--spot-price", prices.spot, limit, "rent on demand only, or give another"))


def _check_deadline(plan: Deadline, alone: MarketOutcome, prices: Prices) -> None:
    """Refuse a deadline that a run on demand alone cannot meet, with the cheapest plans that can be met."""
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
