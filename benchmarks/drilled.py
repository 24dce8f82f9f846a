"""How far the simulator is from real training: excerpts of three records of spot capacity, drilled and simulated.

Each excerpt is the beginning of its record, scaled to at most four nodes. Its changes keep their order and their relative
distances, but come a hundred steps apart on average instead of hours: a drill of eleven hours would show the same restarts.
Every loss is announced 12 s before. Nodes are raylets on this machine, so all of them share its cores. The drill's losses and
samples are compared with an undisturbed twin's. The simulation then gets the changes when they came, and the measured
costs: a usual step and restart, the first start, each new process, and the twin's share of waits for saves and rows. When to
restart, with whom, and what all that comes to, it says by itself.

    python benchmarks/drilled.py --traces FOLDER [--changes 10] [--quick] [--json]
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import claims

from springtide.api.drill import drill

TRACES = {
    "p3": "bamboo/traces/p3-trace.csv",
    "g4dn": "bamboo/traces/g4dn-trace.csv",
    "v100_4": "skypilot-spot-traces/preemption/4-node/aws-08-03-2023/us-west-2c_v100_1.json",
}
GOAL = 0.02


def measure(file: str, changes: int) -> dict[str, Any]:
    """One record, as it was drilled and as it is simulated; in a process of its own, for a process has one cluster."""
    found = drill("trace", functools.partial(print, file=sys.stderr, flush=True), faults=changes, trace=file)
    assert found.predicted_goodput is not None
    assert found.ok, f"{file}: {found.describe()}, {found.left_undone}, {found.leftovers}"
    restarts = found.ledger.restarts
    return {
        "drilled": found.ledger.goodput,
        "simulated": found.predicted_goodput,
        "difference": found.predicted_goodput - found.ledger.goodput,
        "restarts": len(restarts),
        "steps_lost": sum(one.steps_lost for one in restarts),
        "gaps_s": [round(one.gap_s, 2) for one in restarts],
        "spent": {kind: round(worker_s, 1) for kind, worker_s in found.ledger.spent.items()},
    }


def main() -> None:
    """Drill, simulate, print, judge."""
    options = claims.options(__doc__, rounds=1, text="traces", changes=(10, 2))
    found = dict[str, dict[str, Any]]()
    for name, place in list(TRACES.items())[: 1 if options.quick else len(TRACES)]:
        file = Path(options.traces, place)
        if not options.traces or not file.is_file():
            print(f"{name:8}  is not there: --traces names the folder of the records", file=sys.stderr)
            continue
        row = found[name] = claims.alone(measure, str(file), int(options.changes))
        print(
            f"{name:8}  drilled {row['drilled']:.3f}, simulated {row['simulated']:.3f}: {row['difference']:+.3f}; "
            f"{row['restarts']} restarts, {row['steps_lost']} steps lost",
            flush=True,
        )
    if found:
        most = max(abs(row["difference"]) for row in found.values())
        claims.show(options, [claims.claim("simulated_minus_drilled", most, GOAL, "lower", found)])
    else:
        claims.show(options, [])


if __name__ == "__main__":
    main()
