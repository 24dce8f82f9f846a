"""What of an ideal run real spot capacity would leave: the policy that trains, on records of it, beside checkpoint-restart.

Simulated by ``elastic/simulate.py``, a worker a node. The ideal loses no second and uses every node at every moment. Each
record is played with notices of 120, 30 and 0 s, and with two costs: those of two cores (2.5 s a restart, as
benchmarks/recovery.py measured, 15 s a new process), and such as GPUs may have (20 s, 90 s). Without notices it is played
with snapshots in memory only, and with a state that is whole on each device, as with DDP. Beside it stands training with
checkpoints only, as is usual (every ten minutes, bare Ray Train's 75 s a restart), and tuned (our time per restart, the best
interval for that record); its saves and new processes cost nothing.

Then each record has a deadline, 1.2 and 2 times of what on-demand nodes alone take for work that fills half of it. The prices
are those of p3.2xlarge, 3.06 dollars an hour on demand and 0.918 on the spot market. Costs are parts of that on demand alone;
the goal is what Can't Be Late (NSDI 2024) saves at least, 27%.

    python benchmarks/goodput.py --traces FOLDER [--quick] [--json]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import claims

from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs, checkpoint_restart, simulate, tuned_checkpoint_restart
from springtide.elastic.traces import FailureRates, Trace, larger, poisson_failures
from springtide.planning.simulation import RESTART_S, SAVES_S, read_trace, simulate_deadline
from springtide.tracking.ledger import Prices

TRACES = {
    "p3": "bamboo/traces/p3-trace.csv",
    "g4dn": "bamboo/traces/g4dn-trace.csv",
    "gcp_a100": "bamboo/traces/gcloud/a100x1-east1b.txt",
    "v100": "skypilot-spot-traces/availability/16-node/aws-08-27-2023/us-east-2b_v100_1.json",
    "v100_2a": "skypilot-spot-traces/availability/16-node/aws-08-27-2023/us-west-2a_v100_1.json",
    "v100_4": "skypilot-spot-traces/preemption/4-node/aws-08-03-2023/us-west-2c_v100_1.json",
    "v100_1f": "skypilot-spot-traces/preemption/4-node/aws-08-03-2023/us-east-1f_v100_1.json",
}
COSTS = {"cpu": Costs(), "gpu": Costs(restart_s=20.0, warm_up_s=90.0)}
NOTICES_S = (120.0, 30.0, 0.0)
DDP = 1
"""Workers that hold a whole copy of the state."""
START_S = 180.0
"""From the order of an on-demand node until it is there."""
DEADLINES = (1.2, 2.0)
MARKET_NOTICES_S = (120.0, 0.0)
PRICES = Prices(other=3.06, spot=0.918)
RELIABLE = (2048, 16, 54.0, 3.1)
"""Nodes, lanes of each, days, hours between failures: about Llama 3's."""
RELIABLE_QUICK = (64, 4, 2.0, 3.1)


def measure(trace: Trace, costs: Costs) -> dict[str, float]:
    """One record at one cost: parts of the ideal."""
    bounds, begin = Bounds(1, trace.most), time.perf_counter()
    noticed = {notice_s: simulate(trace, bounds, costs._replace(notice_s=notice_s)) for notice_s in NOTICES_S}
    took_s = time.perf_counter() - begin
    replicas = simulate(trace, bounds, costs._replace(notice_s=0.0, replica_shards=DDP))
    tuned = tuned_checkpoint_restart(trace, bounds, costs.restart_s, costs.save_s)
    return {
        "nodes": trace.most,
        "changes": len(trace.changes),
        "notice_120": noticed[120.0].of_ideal,
        "restarts": noticed[120.0].restarts,
        "notice_30": noticed[30.0].of_ideal,
        "snapshots_0": noticed[0.0].of_ideal,
        "replicas_0": replicas.of_ideal,
        "usual": checkpoint_restart(trace, bounds, SAVES_S, RESTART_S).of_ideal,
        "tuned": tuned.result.of_ideal,
        "every_s": tuned.every_s,
        "took_s": took_s,
    }


def reliable(nodes: int, lanes: int, days: float, mttf_h: float) -> dict[str, float]:
    """A cluster whose nodes fail now and then, at the dear costs, whole lanes included."""
    trace = poisson_failures(nodes, days * 86400, FailureRates(mttf_h * 3600))
    bounds, begin = Bounds(1, nodes, lanes=nodes * lanes), time.perf_counter()
    found = simulate(trace, bounds, COSTS["gpu"]._replace(notice_s=0.0))
    return {
        "of_ideal": found.of_ideal,
        "uneven": found.uneven / found.possible,
        "restarting": found.restarting / found.possible,
        "recomputed": found.recomputed / found.possible,
        "restarts": found.restarts,
        "lost_memory": found.lost_memory,
        "took_s": time.perf_counter() - begin,
    }


def market(name: str, file: Path) -> list[dict[str, float | str]]:
    """One record with deadlines: cost of each rule, as a part of on demand alone, and by how much it is early [h]."""
    trace, costs, found = read_trace(str(file)), COSTS["gpu"], list[dict[str, float | str]]()
    start_h = (START_S + costs.first_start_s) / 3600
    work = (0.99 * trace.end_s / 3600 / max(DEADLINES) - start_h) * trace.most
    for factor in DEADLINES:
        for notice_s in MARKET_NOTICES_S:
            deadline_h = factor * (work / trace.most + start_h)
            costs = costs._replace(notice_s=notice_s)
            runs = simulate_deadline(str(file), deadline_h, work, PRICES, start_s=START_S, costs=costs).runs
            row: dict[str, float | str] = {"record": name, "factor": factor, "notice_s": notice_s}
            for rule, run in runs.items():
                row[rule] = run.dollars / runs["on_demand"].dollars
                row[f"{rule}_early_h"] = max(deadline_h - run.finish_h, -999.0)
            found.append(row)
            cells = [f"{rule} {row[rule]:.3f} ({row[f'{rule}_early_h']:.1f} h early)" for rule in runs]
            print(f"{name:8} deadline x{factor:g}, notice {notice_s:g} s: " + ", ".join(cells), flush=True)
    return found


def main() -> None:
    """Measure, print, judge."""
    options = claims.options(__doc__, rounds=1, text="traces")
    found, rented = dict[str, dict[str, float]](), list[dict[str, float | str]]()
    for name, place in TRACES.items():
        file = Path(options.traces, place)
        if not options.traces or not file.is_file():
            print(f"{name:8}  is not there: --traces names the folder of the records", file=sys.stderr)
            continue
        trace = read_trace(str(file))
        for times in (1,) if options.quick else (1, 8):
            if times * trace.most > 600:
                continue
            for cost, costs in COSTS.items():
                row = measure(larger(trace, times) if times > 1 else trace, costs)
                if not found:
                    print("  ".join(["record, costs ", *(f"{column:>11}" for column in row)]))
                label = f"{name}{f'x{times}' if times > 1 else ''} {cost}"
                print("  ".join([f"{label:14}", *(f"{value:11.4g}" for value in row.values())]), flush=True)
                found[label] = row
        rented += market(name, file)
    goals = [
        ("goodput_p3_notice", "p3 cpu", "notice_120", 0.98),
        ("goodput_p3_gpu_costs", "p3 gpu", "notice_120", 0.93),
        ("goodput_p3x8_no_notice", "p3x8 cpu", "replicas_0", 0.87),
    ]
    judged = [
        claims.claim(name, found[label][column], goal, "higher", found[label])
        for name, label, column, goal in goals
        if label in found
    ]
    if rented:
        least = min(float(row["uniform_progress_early_h"]) for row in rented)
        judged.append(claims.claim("deadline_met_by_h", least, 0.0, "higher", rented))
        mean = sum(float(row["uniform_progress"]) for row in rented) / len(rented)
        judged.append(claims.claim("deadline_cost_vs_on_demand", mean, 0.73, "lower", rented))
    cluster = reliable(*(RELIABLE_QUICK if options.quick else RELIABLE))
    print("reliable: " + ", ".join(f"{name} {value:.4g}" for name, value in cluster.items()))
    judged.append(claims.claim("goodput_2048_reliable", cluster["of_ideal"], 0.99, "higher", cluster))
    claims.show(options, judged)


if __name__ == "__main__":
    main()
