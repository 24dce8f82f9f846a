"""Eight nodes of eight GPUs: start, speed, memory tier, a cold compile, and two layouts, of llama3_8b.

NOT RUN YET by anybody of this project. Each row is a run of its own on the Ray cluster that ``ray status`` shows:

    8, 64 workers              how long from the start to the first step, phase by phase; tokens/s a GPU
    memory tier off            what snapshots in the nodes' memory cost a step
    cold compile               the same start after `rm -rf` of the compile cache on every node (it asks you to)
    hsdp 8 x 8                 a copy of the model a node, against one over all 64

Expected: tokens/s a GPU at 64 within 5 % of those at 8; the memory tier below 3 %. To compare with on the same nodes:
torchtitan's llama3_8b (FSDP, compile), and torchft's HSDP with one replica group killed.

    python benchmarks/gpu/two/many_nodes.py CONFIG [--root SHARED] [--workers 64]    (one_node.py writes a CONFIG)
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from one_node import LENGTH, WARM_UP, call

from springtide.events import Started
from springtide.store import Folder
from springtide.track.journal import last_steps, read_journal

STEPS, ROWS = 200, 512


def main() -> None:
    """Row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--root", default="runs", help="where every node sees it")
    parser.add_argument("--workers", type=int, default=64)
    options = parser.parse_args()
    rows: dict[str, tuple[int, list[str]]] = {
        "eight": (8, []),
        "all": (options.workers, []),
        "no-memory-tier": (options.workers, ["--checkpoint.memory-every", "0"]),
        "hsdp": (options.workers, ["--parallel.shard-workers", "8"]),
        "cold": (options.workers, []),
    }
    for name, (workers, changes) in rows.items():
        if name == "cold":
            input("remove the compile cache (TORCHINDUCTOR_CACHE_DIR, or /tmp/torchinductor_*) on every node; Enter. ")
        call(
            *("springtide", "train", "--config", options.config, "--run.id", name, "--run.root", options.root),
            *("--elastic.min-workers", str(workers), "--elastic.max-workers", str(workers)),
            *("--stream.global-batch", str(ROWS), "--train.total", str(STEPS * ROWS * LENGTH), *changes),
        )
        show(options.root, name, workers)


def show(root: str, name: str, workers: int) -> None:
    """Start and speed of one."""
    events = read_journal(Folder(root) / name)
    steps = last_steps(events)
    for event in events:
        if isinstance(event, Started):
            print(f"{name}: {event.world_size} workers, phases {event.phases_s}", flush=True)
    if len(steps) > WARM_UP:
        rate = statistics.median(step.tokens_per_s for step in steps[WARM_UP:]) / workers
        print(f"{name}: first step {steps[0].step_time_s:.1f} s, {rate:.0f} tokens/s a GPU", flush=True)


if __name__ == "__main__":
    main()
