"""What a run costs at size: calls, bytes, processor time and memory at 8, 64, 512 and 2,048 ranks, groups, trials or steps,
each beside its formula.

The code is real. The store is a folder in memory whose requests are counted as S3 would see them; Ray's processes, its control
store and the other ranks are stand-ins that answer at once and are counted. So nothing here waits, and no time on a network is
in a figure: the requests and bytes say what there would be.

    state      a save's part of a rank, rank 0's commit, the removal of old checkpoints, a rank's part of a restore, and the
               look-up of snapshots in memory and of the pieces of the one that is chosen; 16 tensors, 8 ranks a node
    control    processes for a group, a look at a group that trains, slow devices, connections, shares of many trials, and
               Ray Data's own actors when all ranks begin to read
    data       a dataset of 50 row groups a unit is opened and sought; a journal of 50 steps a unit is read and made a page

exponent_*: the largest of the slopes of calls, bytes, processor time and memory over size, by least squares in logarithms: 1 is
linear. The calls are of all processes together, the rest of the busiest process.

    python benchmarks/scale.py [--quick] [--json] [--rounds 3] [--only restore,commit]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import claims
import scale_control
import scale_data
import scale_state
from scale_counts import Cost

SIZES, QUICK = (8, 64, 512, 2048), (8, 16)
GOAL = 1.1


class Measured(NamedTuple):
    """Something that is measured."""

    function: Callable[[int, int], Cost]
    axis: str
    formula: str


ALL = {
    "save": Measured(scale_state.save, "ranks W", "9 W requests in the first save of a group, 7 W later"),
    "commit": Measured(scale_state.commit, "ranks W", "W + 4 W / 1000 + 6 requests; 0.2 KB a piece"),
    "retention": Measured(scale_state.retention, "ranks W", "2 K + 2 W (K + 1) / 1000 + 6 requests (K 4 kept)"),
    "restore": Measured(scale_state.restore, "ranks W", "4 W requests; 0.1 KB a piece from the other ranks"),
    "lookup": Measured(scale_state.lookup, "ranks W", "4 N + 5 calls of rank 0 (N = W / 8); 4 parts a rank"),
    "pieces": Measured(scale_state.pieces, "ranks W", "W calls; 0.1 KB a piece from the other ranks"),
    "start": Measured(scale_control.start, "ranks W", "W / 2 new processes, a look for each quarter of them"),
    "poll": Measured(scale_control.poll, "ranks W", "calls a second: 5 W, at most 500"),
    "compare": Measured(scale_control.compare, "ranks W", "one sort, W log W"),
    "connections": Measured(scale_control.connections, "ranks W", "48 W bytes in three exchanges"),
    "queue": Measured(scale_control.queue, "trials R", "R calls; a share for each"),
    "feed_start": Measured(scale_control.feed_start, "ranks W", "2 W calls to the actor of Ray's dashboard"),
    "open": Measured(scale_data.opened, "groups / 50", "a mapped file; 4 B a group of its own"),
    "seek": Measured(scale_data.sought, "groups / 50", "the sum of all groups, once"),
    "journal": Measured(scale_data.journal, "steps / 50", "0.6 KB a step"),
    "report": Measured(scale_data.report, "steps / 50", "charts are thinned: a page of bounded size"),
}


def exponents(sizes: tuple[int, ...], costs: list[Cost]) -> dict[str, float]:
    """The slope of each part of a cost."""
    return {
        field: scale_data.exponent(list(sizes), [float(getattr(cost, field)) for cost in costs])
        for field in Cost._fields
    }


def shown(name: str, found: Measured, costs: dict[int, Cost], slopes: dict[str, float]) -> None:
    """Print a table."""
    print(f"{name} ({found.axis}): {found.formula}")
    for size, cost in costs.items():
        print(
            f"  {size:6,d}  {cost.calls:9,d} calls  {cost.bytes / 1e6:9.3f} MB  {cost.cpu_s * 1e3:10.2f} ms  "
            f"{cost.peak_bytes / 1e6:9.3f} MB of memory"
        )
    print("  slopes: " + ", ".join(f"{field} {slope:.2f}" for field, slope in slopes.items()), flush=True)


def main() -> None:
    """Print the tables and the claims."""
    options = claims.options(__doc__, rounds=3, text="only")
    wanted, told = options.only.split(",") if options.only else list(ALL), []
    for name in wanted:
        found = ALL[name]
        sizes = QUICK if options.quick else SIZES
        costs = {size: found.function(size, int(options.rounds)) for size in sizes}
        slopes = exponents(sizes, list(costs.values()))
        shown(name, found, costs, slopes)
        detail: dict[str, Any] = {"axis": found.axis, "formula": found.formula, "slopes": slopes}
        detail["costs"] = {size: cost._asdict() for size, cost in costs.items()}
        told.append(claims.claim(f"exponent_{name}", max(slopes.values()), GOAL, "lower", detail))
    claims.show(options, told)


if __name__ == "__main__":
    main()
