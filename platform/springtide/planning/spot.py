"""Predict the speed and save interval of a run on spot nodes: simulate the policy of real runs on a record of spot capacity."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

from springtide.config import Config
from springtide.config.cluster_file import NodeType
from springtide.elastic.forecast import ASSUMED_LOSS_S, young_daly_interval
from springtide.elastic.group_sizes import evenness
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs, simulate
from springtide.elastic.traces import Trace, larger
from springtide.planning.calibration import Calibration
from springtide.planning.simulation import read_trace

_MOST_CHANGES = 300
"""At most this many changes of a record of spot capacity are simulated, so that a plan takes seconds."""
_STAGED_PER_S = 2.8e9
"""Bytes per second that a worker copies to host memory at a save, while training waits. Measured in the first save on an H200
(benchmarks/RESULTS.md)."""
_GPU_COSTS = Costs(restart_s=20.0, warm_up_s=90.0)
"""Durations assumed for GPUs, the same as in benchmarks/goodput.py."""
_CPU_COSTS = Costs()


class Market(NamedTuple):
    """The record of spot capacity of a node type; without a record, ``trace`` is None."""

    trace: Trace | None = None
    name: str = ""
    hours: float = 0.0
    """Length of the whole record [h]."""

    @classmethod
    def of(cls, node: NodeType) -> Market:
        """Read the record of spot capacity of a node type, at most its first ``_MOST_CHANGES`` changes. Raises ConfigError if
        it is invalid."""
        if not node.trace:
            return cls()
        whole = read_trace(node.trace)
        kept = whole
        if len(whole.changes) > _MOST_CHANGES:
            kept = dataclasses.replace(
                whole,
                changes=whole.changes[:_MOST_CHANGES],
                end_s=whole.changes[_MOST_CHANGES].time_s,
                hangs_s=(),
            )
        return cls(kept, Path(node.trace).name, whole.end_s / 3600)

    def loss_s(self, nodes: int) -> float | None:
        """Return the mean time between losses of nodes in a run on ``nodes`` nodes; None if the record has no losses [s]. Each
        node is assumed to be lost as often as a node of the record."""
        losses = sum(1 for change in self.trace.changes if change.gone) if self.trace else 0
        return self.trace.end_s / losses * self.trace.most / nodes if self.trace and losses else None

    def describe(self) -> str:
        """Return the record's name as text. If only a part of the record is simulated, add how many of its hours."""
        played = self.trace.end_s / 3600 if self.trace else 0.0
        part = f", its first {played:.0f} of {self.hours:.0f} hours" if played < 0.999 * self.hours else ""
        return f"{self.name}{part}"


class Saves(NamedTuple):
    """How often a run saves checkpoints, and the cost of a save."""

    every_s: float
    """Time between two saves; infinity: save only at the end [s]."""
    cost_s: float
    """Training time that a save costs [s]."""
    reason: str


def saves_of(
    config: Config, step_s: float, worker_bytes: float, market: Market, nodes: int, calibration: Calibration | None
) -> Saves:
    """Return the save interval of a run on a node type, and the cost of a save.

    Args:
        config: settings of the run.
        step_s: duration of a step [s].
        worker_bytes: state that a worker saves [bytes].
        market: the record of spot capacity, from which the rate of losses is taken.
        nodes: number of nodes.
        calibration: a measured run, from which the cost of a save is taken; None: the cost follows from ``worker_bytes``.
    """
    checkpoint = config.checkpoint
    known = calibration.save_s if calibration else None
    cost_s = worker_bytes / _STAGED_PER_S if known is None else known
    told = "assumed" if calibration is None or known is None else f"measured in {calibration.run}"
    if checkpoint.every_steps == "auto":
        seen_s = market.loss_s(nodes)
        loss_s = seen_s or ASSUMED_LOSS_S
        found = young_daly_interval(cost_s, loss_s)
        from_where = f"from {market.describe()}" if seen_s else f"assumed: one in {ASSUMED_LOSS_S / 3600:.0f} h"
        return Saves(found.every_s, cost_s, f"{found.reason} (its cost {told}, losses {from_where})")
    every_s = checkpoint.every_steps * step_s if checkpoint.every_steps else math.inf
    return Saves(
        every_s, cost_s, f"checkpoint.every_steps = {checkpoint.every_steps}; a save costs {cost_s:.2g} s ({told})"
    )


class Spot(NamedTuple):
    """A simulated run on spot nodes, compared with a run on nodes that are never lost."""

    speed: float
    """Training speed on spot nodes, as a share of the speed on the maximum number of nodes without losses."""
    nodes: float
    """Mean number of spot nodes that the run uses and pays for."""
    of_ideal: float | None
    """Productive time as a share of a run that loses no time; None without a record of spot capacity."""
    source: str


def spot_of(
    config: Config,
    node: NodeType,
    nodes: int,
    least: int,
    market: Market,
    step_s: float,
    saves: Saves,
    calibration: Calibration | None,
) -> Spot:
    """Simulate a run on at most ``nodes`` spot nodes.

    Args:
        config: settings of the run.
        node: node type of the spot nodes.
        nodes: most nodes to use.
        least: fewest nodes on which a step fits.
        market: the record of spot capacity; without a record no node is ever lost.
        step_s: duration of a step on ``nodes`` nodes [s].
        saves: save interval and cost of a save, from ``saves_of``.
        calibration: a measured run, from which the time of a restart is taken; None: the time is assumed.
    """
    if market.trace is None or not market.trace.most:
        return Spot(1.0, float(nodes), None, f"no record for {node.name}: as if no spot node were ever lost")
    record = market.trace
    times = max(1, len(node.zones), -(-nodes // record.most))
    if times > 1:
        record = larger(record, times)
    lanes, checkpoint, shards = config.stream.num_lanes, config.checkpoint, config.parallel.shards
    assumed = _GPU_COSTS if config.elastic.gpus_per_worker else _CPU_COSTS
    restart_s = calibration.restart_s if calibration and calibration.restart_s is not None else assumed.restart_s
    costs = assumed._replace(
        step_s=step_s,
        restart_s=restart_s,
        notice_s=float(node.notice),
        copies=checkpoint.memory_copies if checkpoint.memory_every else 0,
        store_every_s=min(saves.every_s, 1e9),
        save_s=saves.cost_s,
        replica_shards=-(-shards // node.devices) if shards else 0,
    )
    # a simulated worker is a node with all its devices, so a simulated lane is one lane (fixed share of a batch) per device
    whole = lanes // node.devices
    bounds = Bounds(least, nodes, lanes=whole if whole >= nodes and lanes % node.devices == 0 else 0)
    found = simulate(record, bounds, costs)
    told = f"restarts of {restart_s:.3g} s " + (
        f"measured in {calibration.run}" if calibration and calibration.restart_s is not None else "assumed"
    )
    speed = found.productive / (record.end_s * nodes * evenness(bounds.lanes, nodes))
    copies = f", {times} times from several places of it" if times > 1 else ""
    return Spot(
        speed, found.possible / record.end_s, found.of_ideal, f"simulated on {market.describe()}{copies}, {told}"
    )
