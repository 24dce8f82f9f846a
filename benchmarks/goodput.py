"""What of an ideal run real spot capacity would leave: the policy that trains, on records of it, beside checkpoint-restart.

Simulated by ``elastic/simulate.py``, a worker a node, at about 32, 256 and 2,048 nodes (many clusters, each at another place of
the record). A restart takes what benchmarks/recovery.py measured, or more; a notice comes two minutes before a loss, as on AWS,
or none at all. The ideal loses no second and uses every node at every moment. Checkpoint-restart saves every ten minutes for
nothing, and takes bare Ray Train's 75 s to start again.

    python benchmarks/goodput.py --traces FOLDER [--quick] [--json]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import claims

from springtide.app.simulate import RESTART_S, SAVES_S, read_trace
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs, checkpoint_restart, simulate
from springtide.elastic.traces import larger

TRACES = {
    "p3": "bamboo/traces/p3-trace.csv",
    "g4dn": "bamboo/traces/g4dn-trace.csv",
    "gcp_a100": "bamboo/traces/gcloud/a100x1-east1b.txt",
    "v100": "skypilot-spot-traces/availability/16-node/aws-08-27-2023/us-east-2b_v100_1.json",
}
NODES = (32, 256, 2048)
GOAL = 0.95


def measure(file: Path, nodes: int) -> dict[str, Any]:
    """One record, at about so many nodes."""
    trace = read_trace(str(file))
    times = max(1, round(nodes / trace.most))
    trace = larger(trace, times) if times > 1 else trace
    bounds, begin = Bounds(1, trace.most), time.perf_counter()
    noticed = simulate(trace, bounds, Costs())
    took_s = time.perf_counter() - begin
    return {
        "nodes": trace.most,
        "hours": trace.end_s / 3600,
        "changes": len(trace.changes),
        "with_notice": noticed.of_ideal,
        "restarts": noticed.restarts,
        "without_notice": simulate(trace, bounds, Costs(notice_s=0.0)).of_ideal,
        "checkpoint_restart": checkpoint_restart(trace, bounds, SAVES_S, RESTART_S).of_ideal,
        "took_s": took_s,
    }


def main() -> None:
    """Measure, print, judge."""
    options = claims.options(__doc__, rounds=1, text="traces")
    found = []
    columns = ("nodes", "hours", "changes", "with_notice", "restarts", "without_notice", "checkpoint_restart", "took_s")
    print("  ".join(["trace   ", *(f"{column:>18}" for column in columns)]))
    for name, place in TRACES.items():
        file = Path(options.traces, place)
        if not options.traces or not file.is_file():
            print(f"{name:8}  is not there: --traces names the folder of the records", file=sys.stderr)
            continue
        for nodes in NODES[:1] if options.quick else NODES:
            row = measure(file, nodes)
            print("  ".join([f"{name:8}", *(f"{row[column]:18.4g}" for column in columns)]), flush=True)
            found.append(claims.claim(f"goodput_vs_ideal_{name}_{nodes}", row["with_notice"], GOAL, "higher", row))
    claims.show(options, found)


if __name__ == "__main__":
    main()
