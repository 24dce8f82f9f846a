"""Start runs on busy cores, and count the healthy processes that are ended.

Each start has new worker processes, which import torch. One in ten holds Python's lock for a minute while it builds its
model, as a call into C does; one in ten compiles its model. Exit status 1 if a run restarted, failed or did not finish.

    python busy_starts.py [--starts 50] [--load 8]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from own_model import build
from torch import nn

WORKERS = 2
BUSY = "import os\nwhile os.getppid() == {parent}:\n    sum(range(10_000_000))"
LOCK_S = 60
"""Time for which ``build_slowly`` holds Python's lock [s]."""


def build_slowly(config: Any, vocab_size: int, eos_id: int | None, bos_id: int | None) -> nn.Module:
    """Build the model after a call that holds Python's lock."""
    ctypes.PyDLL(None).sleep(LOCK_S)
    return build(config, vocab_size, eos_id, bos_id)


def start(number: int, base: Any) -> tuple[str, float, list[str]]:
    """Train a few steps; returns what was special, the seconds, and what happened to healthy processes."""
    import springtide as st
    from springtide.events import Decided, Event, Failed, Started

    kind = {3: "lock", 7: "compile"}.get(number % 10, "plain")
    changes = {"run.id": f"start-{number}"}
    changes |= {"lock": {"model.source": "busy_starts:build_slowly"}, "compile": {"parallel.compile": True}}.get(
        kind, {}
    )
    heard = list[Event]()
    begin_s = time.monotonic()
    try:
        run = st.train(base.override(changes), listen=heard.append)
        ended = [] if run.last_step else ["no step"]
    except Exception as error:
        ended = [repr(error)]
    took_s = time.monotonic() - begin_s
    ended += [str(one) for one in heard if isinstance(one, Failed)]
    ended += [str(one) for one in heard if isinstance(one, Decided) and one.decision in ("leave", "replace")]
    ended += [f"{starts} groups"] if (starts := sum(isinstance(one, Started) for one in heard)) != 1 else []
    return kind, took_s, ended


def main() -> int:
    """Print a line a start, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--load", type=int, default=8, help="busy processes")
    options = parser.parse_args()
    from prepared import prepare

    from springtide import config as configs
    from springtide.ray.cluster.session import cluster

    busy = [sys.executable, "-c", BUSY.format(parent=os.getpid())]
    failures, slowest = 0, dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        changes = {"shards.root": f"{folder}/data", "run.root": f"{folder}/runs", "feed.cache": f"{folder}/cache"}
        changes |= {"track.mlflow_uri": "off", "track.progress": False, "train.total": 3072 * 3, "train.eval_tokens": 0}
        changes |= {"elastic.min_workers": WORKERS, "elastic.max_workers": WORKERS}
        base = prepare(configs.recipes.tiny().override(changes))
        # Ray gives its own processes 30 s to start, which is not what is tried here
        with cluster(base, dashboard=False):
            load = [subprocess.Popen(busy) for _ in range(options.load)]
            try:
                for number in range(options.starts):
                    kind, took_s, ended = start(number, base)
                    failures += bool(ended)
                    slowest[kind] = max(slowest.get(kind, 0.0), took_s)
                    print(f"{number:3} {kind:8} {took_s:6.1f} s  {'; '.join(ended) or 'held'}", flush=True)
            finally:
                for process in load:
                    process.kill()
                    process.wait()
    longest = ", ".join(f"{kind} {took_s:.0f} s" for kind, took_s in slowest.items())
    print(f"{options.starts} starts beside {options.load} busy processes; longest: {longest}")
    print(f"{failures} starts ended a healthy process")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
