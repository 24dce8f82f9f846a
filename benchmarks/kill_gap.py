"""How soon the driver acts on a killed worker, without and with report.html being written of a long journal beside it.

    plain     a new run of two workers; no page is written
    paged     the same run, in a folder whose journal has a million steps; its page is written without a pause, all the time,
              where a real run waits 200 times as long as a page takes

Workers are killed one by one, each after some steps. The gap is the time from the signal until the driver has found out, by the
event ``failed``: from then on it restarts. Each round is a fresh process and cluster, where one mode follows the other, in turn
another one first.

    python benchmarks/kill_gap.py [--quick] [--json] [--rounds 3] [--steps 1000000] [--kills 4]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import claims
import page

MODES = ("plain", "paged")
SETTLED = 10
"""Steps of a group before one of its workers is killed."""
WRITER = "import sys; from springtide.run import live_report as r; r.EVERY_S = {}; r.TIMES = 0; r.main(sys.argv[1])"


def measure(root: str, number: int, kills: int) -> dict[str, Any]:
    """A round: mode -> seconds until the driver knew of each kill, and the pages that were written meanwhile."""
    import springtide as st
    from springtide.ray.cluster.session import cluster

    found = {}
    with cluster(st.recipes.tiny().override({"elastic.max_workers": 2}), dashboard=False):
        for mode in MODES if number % 2 == 0 else MODES[::-1]:
            found[mode] = train(root, mode == "paged", kills)
            print(f"round {number + 1}, {mode}: {found[mode]}", file=sys.stderr, flush=True)
    return found


def train(root: str, is_paged: bool, kills: int) -> dict[str, Any]:
    """Train until so many workers were killed; what ``measure`` finds of one mode."""
    import springtide as st
    from springtide.checkpoint import leases
    from springtide.events import Event, Failed, Started, StepDone
    from springtide.ray.cluster.local import kill_worker
    from springtide.run import live_report
    from springtide.run.folder import Run
    from springtide.storage import Folder

    name = "long" if is_paged else f"plain-{time.time_ns()}"
    live_report.PROGRAM = ("-c", WRITER.format(0.0 if is_paged else 1e6))
    run = Run(Folder(root) / name)
    changes = {
        "run.id": name,
        "run.root": root,
        "shards.root": f"{root}/datasets",
        "stream.max_epochs": 1e6,
        "parallel.threads": 1,
        "elastic.min_workers": 2,
        "elastic.max_workers": 2,
        "elastic.max_failures": 1000,
        "train.total": "100M",
        "train.eval_tokens": 0,
        "train.sample_tokens": 0,
        "track.mlflow_uri": "off",
        "track.progress": False,
    }
    config = st.prepare(st.recipes.tiny().override(changes))
    if is_paged:  # as if a driver had trained the million steps
        run.write_config(config)
        leases.end(run.folder, leases.claim(run.folder, "before", trains=False).term)
    killed, found, pages, over = list[float](), list[float](), set[int](), threading.Event()
    report, settled = Path(run.folder.where("report.html")), 0
    report.unlink(missing_ok=True)  # of the round before

    def listen(event: Event) -> None:
        nonlocal settled
        match event:
            case Started():
                settled = 0
            case Failed() if len(killed) > len(found):
                found.append(event.time_s - killed[-1])
            case StepDone():
                settled += 1
                if report.exists():
                    pages.add(report.stat().st_mtime_ns)
                if len(found) == kills:
                    over.set()
                elif settled >= SETTLED and len(killed) == len(found) and (pages or not is_paged):
                    killed.append(time.time())
                    kill_worker()

    threading.Thread(target=lambda: (over.wait(), run.stop(120.0)), daemon=True).start()
    st.train(config, listen=listen, resume=is_paged, from_scratch=is_paged)
    return {"gaps_s": [round(gap, 3) for gap in found], "pages": len(pages)}


def main() -> None:
    """Measure, and print the claims."""
    options = claims.options(__doc__, rounds=3, steps=(1_000_000, 20_000), kills=(4, 1))
    with tempfile.TemporaryDirectory() as root:
        page.written(root, int(options.steps), int(options.steps) // 100)
        rounds = [claims.alone(measure, root, number, int(options.kills)) for number in range(options.rounds)]
    gaps = {mode: [gap for one in rounds for gap in one[mode]["gaps_s"]] for mode in MODES}
    plain, paged = (statistics.median(gaps[mode]) for mode in MODES)
    detail = {"steps": int(options.steps), "pages": [one["paged"]["pages"] for one in rounds], **gaps}
    shown = [
        claims.claim("kill_noticed_s", paged, 1.0, "lower", detail),
        claims.claim("kill_noticed_later_s", paged - plain, 0.1, "lower", detail),
    ]
    claims.show(options, shown)


if __name__ == "__main__":
    main()
