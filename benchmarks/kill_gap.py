"""How soon the driver acts on a killed worker, without and with report.html being written of a long journal beside it.

    plain     a new run of two workers; no page is written
    paged     the same run, in a folder whose journal has a million steps; its page is written without a pause all the time,
              where a real run waits 200 times as long as a page takes

Workers are killed one by one, each after some steps. The gap is the time from the signal until the driver has found out, by the
event ``failed``: from then on it restarts. Each round is a fresh process and cluster for either; the modes alternate.

    python benchmarks/kill_gap.py [--quick] [--json] [--rounds 3] [--steps 1000000] [--kills 5]
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import claims
import page

SETTLED = 10
"""Steps of a group before one of its workers is killed."""
WRITER = (
    "import sys; from springtide.run import live_report as r; r.EVERY_S = {every}; r.TIMES = 0; r.main(sys.argv[1])"
)


def gaps(root: str, is_paged: bool, kills: int) -> dict[str, Any]:
    """Seconds until the driver knows of each kill; how many pages were written meanwhile."""
    import springtide as st
    from springtide.checkpoint import leases
    from springtide.events import Event, Failed, Started, StepDone
    from springtide.on_ray.cluster.local import kill_worker
    from springtide.on_ray.cluster.session import cluster
    from springtide.run import live_report
    from springtide.run.folder import Run
    from springtide.store import Folder

    name = "long" if is_paged else f"plain-{time.time_ns()}"
    live_report.PROGRAM = ("-c", WRITER.format(every=0.0 if is_paged else 1e6))
    run = Run(Folder(root) / name)
    changes = {
        "run.id": name,
        "run.root": root,
        "shards.root": f"{root}/datasets",
        "stream.max_epochs": 1e6,
        "parallel.threads": 1,
        "elastic.min_workers": 1,
        "elastic.max_workers": 2,
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
    killed, found, pages = list[float](), list[float](), set[int]()
    report, settled = Path(run.folder.where("report.html")), 0

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
                if settled == SETTLED and len(found) < kills and (pages or not is_paged):
                    killed.append(time.time())
                    kill_worker()
                elif len(found) == kills and not over.is_set():
                    over.set()
                elif settled == SETTLED:
                    settled = 0  # the first page is not there yet

    over = threading.Event()
    stopper = threading.Thread(target=lambda: (over.wait(), run.stop(120.0)))
    stopper.start()
    with cluster(config, dashboard=False):
        st.train(config, listen=listen, resume=is_paged, from_scratch=is_paged)
    stopper.join()
    return {"gaps_s": found, "pages": len(pages)}


def main() -> None:
    """Measure, and print the claims."""
    options = claims.options(__doc__, rounds=3, steps=(1_000_000, 20_000), kills=(5, 1))
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as root:
        page.written(root, int(options.steps), int(options.steps) // 100)
        for number in range(options.rounds):
            for is_paged in (number % 2 == 1, number % 2 == 0):
                found[is_paged].append(claims.alone(gaps, root, is_paged, int(options.kills)))
    each = {kind: [gap for one in rounds for gap in one["gaps_s"]] for kind, rounds in found.items()}
    plain, paged = (statistics.median(each[kind]) for kind in (False, True))
    detail = {"steps": int(options.steps), "pages": [one["pages"] for one in found[True]], "plain_s": round(plain, 3)}
    detail |= {name: [round(gap, 3) for gap in each[kind]] for name, kind in (("plain", False), ("paged", True))}
    shown = [
        claims.claim("kill_noticed_s", paged, 1.0, "lower", detail),
        claims.claim("kill_noticed_later_s", paged - plain, 0.1, "lower", detail),
    ]
    claims.show(options, shown)


if __name__ == "__main__":
    main()
