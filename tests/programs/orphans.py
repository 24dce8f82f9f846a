"""Two runs on two raylets, a rank on each; their driver is killed. Prints one line of JSON: what the snapshot servers do then.

python orphans.py                   starts the cluster and a driver, and kills that
python orphans.py ADDRESS ROOT      the driver
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from saving import meta, state

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.inspect import inspect
from springtide.checkpoint.restore import restore
from springtide.checkpoint.snapshots import Snapshotter
from springtide.checkpoint.tensors import named_tensors
from springtide.config import Config
from springtide.ray.cluster.session import NAMESPACE
from springtide.ray.train.mailbox import MailboxClient, open_mailbox
from springtide.ray.train.snapshot_client import SnapshotClient
from springtide.ray.train.snapshot_lookup import name_prefix, servers_named
from springtide.storage import Folder

NODES = 2
ALONE_S = 8.0
RUNS = ("left", "taken")
"""Nobody claims the first one again; another driver claims the second."""
LAST = 5


def config_of(root: str, name: str) -> Config:
    return configs.recipes.tiny().override({"run.id": name, "run.root": root})


class Rank:
    """One rank of a run, without a training loop."""

    def __init__(self, rank: int, term: int, config: Config, mailbox: MailboxClient) -> None:
        run = Folder(config.run.root) / config.run.id
        self.servers = SnapshotClient(config, run, mailbox, ALONE_S, owner="driver")
        self.memory = Snapshotter(self.servers, term, rank, NODES, "/dev/shm")
        self.config = config

    def pair(self, nodes: list[str]) -> None:
        self.servers.pair(nodes)

    def snapshot(self, step: int) -> None:
        """Take one, and wait until it is safe."""
        changes = {"world_size": NODES, "config_fingerprint": configs.fingerprint(self.config)}
        self.memory.begin(named_tensors(*state(step)), meta(step).model_copy(update=changes))
        self.memory.staged()
        while self.memory.busy():
            time.sleep(0.01)  # between looks


def drive(address: str, root: str) -> None:
    """Take snapshots, print the processes that hold them, and wait to be killed."""
    path = [str(Path(__file__).parent), *sys.path]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(path)}}
    ray.init(address, namespace=NAMESPACE, log_to_driver=False, runtime_env=environment)
    here = ray.get_runtime_context().get_node_id()
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)
    found: dict[str, list[int]] = {}
    for name in RUNS:
        config = config_of(root, name)
        run, mailbox = Folder(root) / name, open_mailbox(None)
        leases.claim(run, "driver", trains=False)
        term = leases.claim(run, "driver", again=True).term
        ranks: list[Any] = []
        for rank, node in enumerate(nodes):
            options = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
            ranks.append(ray.remote(Rank).options(**options).remote(rank, term, config, mailbox))
        ray.get([one.pair.remote(nodes) for one in ranks])
        for step in range(1, LAST + 1):
            ray.get([one.snapshot.remote(step) for one in ranks])
        answers = ray.get([one.found.remote() for one in servers_named(name_prefix(run))])
        found[name] = [pid for (_, pid), _ in answers]
    print(json.dumps(found), flush=True)
    time.sleep(3600.0)  # until it is killed


def main() -> None:
    """Kill the driver and look."""
    root = tempfile.mkdtemp()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20})
    for _ in range(NODES):
        cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    cluster.wait_for_nodes()
    driver = subprocess.Popen([sys.executable, __file__, cluster.address, root], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    servers = json.loads(next(line for line in driver.stdout if line.startswith("{")))
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    leases.claim(Folder(root) / "taken", "another driver", trains=False)
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline and any(
        Path(f"/proc/{pid}").exists() for pids in servers.values() for pid in pids
    ):
        time.sleep(0.2)  # until they have ended
    found: dict[str, Any] = {
        name: [f"{one.state} {one.step}" for one in inspect(Folder(root) / name, verify=True)] for name in RUNS
    }
    found["servers left"] = sum(Path(f"/proc/{pid}").exists() for pids in servers.values() for pid in pids)
    model, optimizer = state(0)
    restored, expected = restore(Folder(root) / "left", model, optimizer, lambda step: "o"), named_tensors(*state(LAST))
    found["the same bits"] = restored is not None and all(
        torch.equal(tensor, expected[name]) for name, tensor in named_tensors(model, optimizer).items()
    )
    newest = leases.newest(Folder(root) / "taken")
    found["holder"] = newest.owner if newest else ""
    cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    drive(*sys.argv[1:]) if sys.argv[1:] else main()
