"""Two to eight GPUs of one machine: one page to paste into an issue.

    tokens/s        by number of GPUs, with weights sharded over all (zero3), and with a copy of the model in each half (HSDP)
    save stall      how long training waits for a save, in each of these runs
    gaps            seconds without a step at a notice, at a growth and at a kill, over NCCL: the run trains under Ray on a
                    local cluster with a node for each GPU

Every part is a run on Python's own source; a part that fails is a cell with the reason, and the others run. It takes about ten
minutes on eight GPUs. Nobody of this project has more than one GPU, so every page is welcome.

    make gpus                                       # into .venv, with Ray; or: python benchmarks/gpu/several.py
    python benchmarks/gpu/several.py --quick        # two processes on CPUs: a smoke test
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "platform"))

import runs
import torch

from springtide import config as configs
from springtide.api.train import train
from springtide.config import Config
from springtide.events import Event, StepDone
from springtide.ray.cluster.local import LocalCluster
from springtide.run import control
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.tracking.ledger import Restart

HERE = Path(__file__).resolve().parent
NUMBERS = (1, 2, 4, 8)
"""Of GPUs."""
NOTICE_S = 15.0
"""Time between a notice and the loss of the node."""
HSDP_FROM = 4
"""GPUs: fewer have no half that is sharded."""
WAIT_S = 300.0
"""The run is stopped if an event does not happen for so long."""


def main() -> int:
    """Measure, print the page, and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="two processes on CPUs, few steps: a smoke test, no evidence"
    )
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="of this machine (all)")
    parser.add_argument("--out", type=Path, default=Path("gpus.md"), help="file of the page (gpus.md)")
    options = parser.parse_args()
    count = 2 if options.quick else options.gpus
    if count < 2:
        print(f"this machine has {options.gpus} GPUs, and two are needed; --quick takes two CPUs", file=sys.stderr)
        return 3
    shape = Shape(options.quick)
    with tempfile.TemporaryDirectory() as folder:
        speeds = [speed(shape, folder, number) for number in NUMBERS if number <= count]
        halves = cell(lambda: shape.hsdp(folder, count)) if count >= HSDP_FROM else {"why": f"needs {HSDP_FROM} GPUs"}
        found = cell(lambda: gaps(shape, folder, count))
    text = page(shape, count, speeds, halves, found)
    options.out.write_text(text)
    print(text)
    print(f"written to {options.out}: please paste it into an issue of the project", file=sys.stderr)
    return 0


class Shape:
    """What is trained: 125M on GPUs, a tiny model on CPUs."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.name = "tiny" if quick else "gpu_125m"
        recipe = configs.recipes.tiny() if quick else configs.recipes.gpu_125m().override({"parallel.compile": True})
        self.rows, self.steps, self.every = (4, 12, 4) if quick else (32, 120, 40)
        self.between = 8 if quick else 40
        """Steps between two events."""
        more = {"corpus.tokenizer": "bytes", "corpus.max_files": 40 if quick else 300, "elastic.notices": "off"}
        self.recipe = recipe.override(more | {"elastic.gpus_per_worker": 0 if quick else 1})

    def config(self, folder: str, name: str, workers: int, **changes: Any) -> Config:
        """Return the config of a run with as many rows for each worker, whatever their number."""
        rows, more = self.rows * workers, {"checkpoint__every_steps": self.every, "checkpoint__keep_last": 1, **changes}
        more |= {"elastic__max_workers": workers, "train__micro_batch": self.rows}
        return runs.on_text_at_hand(self.recipe, folder, name, rows, self.steps, **more)

    def hsdp(self, folder: str, count: int) -> dict[str, Any]:
        """Train with a copy of the model in each half."""
        half = {"parallel__shard_workers": count // 2, "elastic__min_workers": count}
        return self.trained(self.config(folder, f"hsdp-{count}", count, **half), folder, count)

    def trained(self, config: Config, folder: str, count: int) -> dict[str, Any]:
        """Train under torchrun; return the figures."""
        runs.torchrun(config, folder, processes=count)
        return runs.figures(runs.journal(config), self.every)


def cell(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``measure`` returns, or why it could not."""
    try:
        return measure()
    except Exception as error:  # one part that fails must not cost the page
        return {"why": " ".join(f"{type(error).__name__}: {error}".split())[-300:]}


def speed(shape: Shape, folder: str, number: int) -> dict[str, Any]:
    """Train on some of the GPUs."""
    print(f"{number} of the GPUs", file=sys.stderr, flush=True)
    found = cell(lambda: shape.trained(shape.config(folder, f"zero3-{number}", number), folder, number))
    return {"gpus": number, **found}


def gaps(shape: Shape, folder: str, count: int) -> dict[str, Any]:
    """Train under Ray while a node is announced to go and goes, one joins, and one is killed."""
    print("notice, growth and kill under Ray", file=sys.stderr, flush=True)
    notices = f"{folder}/notice-{{node}}"
    changes = {"elastic__notices": "file", "elastic__notice_file": notices, "elastic__grow": "always"}
    changes |= {"checkpoint__memory_every": 1, "stream__lanes": 0 if shape.quick else count}
    endless = {"train__total": 10**11} | changes
    config = shape.config(folder, "gaps", count, **endless)
    with LocalCluster(count, patience=20 if shape.quick else 2, gpus=0 if shape.quick else count) as cluster:
        director = Director(cluster, config, notices, count, shape.between)
        try:
            run = train(config, listen=director, dashboard=False)
        finally:
            director.close()
    if director.problem:
        raise RuntimeError(director.problem)
    return director.told(run)


class Director:
    """Listener that has a notice, a growth and a kill happen to the nodes of a cluster. Each comes some steps after the group
    has adapted to the one before."""

    def __init__(self, cluster: LocalCluster, config: Config, notices: str, workers: int, between: int) -> None:
        self._cluster, self._notices, self._between = cluster, notices, between
        self._run = Folder(config.run.root) / config.run.id
        self._to_come = [("notice", workers), ("growth", workers - 1), ("kill", workers)]
        """What is to happen, and the number of workers that must train first."""
        self._done: list[tuple[str, float]] = []
        self._steps = 0
        self._gone: threading.Timer | None = None
        self._patience = threading.Timer(WAIT_S, self._give_up)
        self._patience.start()
        self.problem = ""

    def __call__(self, event: Event) -> None:
        """Take in an event of the run."""
        if not isinstance(event, StepDone):
            return
        leaving = self._gone is not None and self._gone.is_alive()
        wanted = self._to_come[0][1] if self._to_come else -1
        self._steps = self._steps + 1 if not leaving and wanted in (-1, event.world_size) else 0
        if self._steps < self._between:
            return
        if not self._to_come:
            if event.world_size < self._workers_at_last:
                control.give(self._run, "stop")
            return
        what, self._workers_at_last = self._to_come.pop(0)
        self._steps = 0
        self._patience.cancel()
        self._patience = threading.Timer(WAIT_S, self._give_up)
        self._patience.start()
        self._done.append((what, time.time()))
        self._act(what)

    def close(self) -> None:
        """End all timers."""
        for timer in (self._gone, self._patience):
            if timer is not None:
                timer.cancel()
                timer.join()

    def told(self, run: Run) -> dict[str, Any]:
        """Return the restart that followed each event."""
        found: dict[str, Any] = {}
        for what, time_s in self._done:
            after: list[Restart] = [one for one in run.ledger.restarts if one.time_s > time_s]
            found[what] = after[0] if after else None
        return found | {"verified": run.verify().ok}

    def _act(self, what: str) -> None:
        if what == "growth":
            self._cluster.add(wait=False)
            return
        node = self._cluster.nodes[-1]
        if what == "kill":
            self._cluster.kill(node)
            return
        Path(self._notices.replace("{node}", node)).write_text(f"{NOTICE_S}")
        self._gone = threading.Timer(NOTICE_S, self._cluster.kill, (node,))
        self._gone.start()

    def _give_up(self) -> None:
        self.problem = f"nothing happened for {WAIT_S:.0f} s after {self._done[-1][0] if self._done else 'the start'}"
        control.give(self._run, "stop")


def page(shape: Shape, count: int, speeds: list[dict[str, Any]], halves: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    kind = "CPU processes (--quick: no evidence)" if shape.quick else torch.cuda.get_device_name()
    lines = [f"## springtide on {count} x {kind}", ""]
    lines += [", ".join(f"{name} {value}" for name, value in about().items()), ""]
    lines += [f"{shape.name}, {shape.rows} rows for each, saves every {shape.every} steps", ""]
    head = (
        "GPUs",
        "layout",
        "tokens/s",
        "for each",
        "of one alone",
        "MFU",
        "peak GB",
        "stall of a save",
        "a save takes",
    )
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    alone = speeds[0].get("tokens_per_s", 0.0)
    rows = [(one["gpus"], "zero3", one) for one in speeds] + [(count, f"HSDP, 2 x {max(1, count // 2)}", halves)]
    rows += [(number, "zero3", {"why": f"needs {number} GPUs"}) for number in NUMBERS if number > count]
    for gpus, layout, one in rows:
        if "why" in one:
            lines.append(
                f"| {gpus} | {layout} | not measured: {one['why'].replace('|', '/')} |" + " |" * (len(head) - 3)
            )
            continue
        each = one["tokens_per_s"] / gpus
        share = f"{each / alone:.2f}" if alone else ""
        cells = (f"{one['tokens_per_s']:,.0f}", f"{each:,.0f}", share, f"{one['mfu']:.1%}", f"{one['peak_gb']:.1f}")
        stall = (
            f"{one['stall_s']:.3f} s = {one['stall_s'] / one['step_s']:.0%} of a step" if one["saves"] else "no save"
        )
        lines.append(f"| {gpus} | {layout} | {' | '.join(cells)} | {stall} | {one.get('save_s', 0):.2f} s |")
    lines += [
        "",
        "| event | without a step | steps lost | workers | cause, as the run has it |",
        "|---|---|---|---|---|",
    ]
    for what in ("notice", "growth", "kill"):
        restart = found.get(what)
        if restart is None:
            lines.append(
                f"| {what} | not measured: {found.get('why', 'no restart followed').replace('|', '/')} | | | |"
            )
            continue
        workers = f"{restart.workers_before} to {restart.workers_after}"
        lines.append(f"| {what} | {restart.gap_s:.1f} s | {restart.steps_lost} | {workers} | {restart.cause} |")
    lines += ["", f"samples of that run verified: {'yes' if found.get('verified') else 'no'}", ""]
    return "\n".join(lines)


def about() -> dict[str, str]:
    """Return the versions and the machine."""
    found = {"date": datetime.date.today().isoformat(), "python": platform.python_version(), "torch": torch.__version__}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    found |= {"commit": commit.stdout.strip() or "unknown", "cores": str(os.cpu_count())}
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


if __name__ == "__main__":
    sys.exit(main())
