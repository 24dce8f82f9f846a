"""A cluster of several raylets on this machine, whose nodes can be announced to go, lost and added: for drills.

The only file that touches Ray's cluster utilities.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any, Self

import ray
from ray.cluster_utils import Cluster

from springtide.on_ray.cluster.nodes import drain
from springtide.on_ray.cluster.session import NAMESPACE, own_address_file, private_folder, set_environment

_STORE_BYTES = 100 * 2**20
_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
}
_IDLE_PROCESSES = "4"
"""Kept on each node: where there are no CPUs Ray would keep none, and each actor of the head would wait for a new one."""


class LocalCluster:
    """A head without CPUs, where this process is the driver, and nodes with one each. A context manager; one a process."""

    def __init__(self, nodes: int, patience: int = 2, dashboard: bool = False) -> None:
        """``patience``: seconds in a row that a node may not answer before it counts as dead; where many processes share few
        cores a head that is busy needs more. ``dashboard``: with the one of Ray, by whose state API bare Ray Train finds what
        a run that was stopped has left."""
        self._first, self._patience, self._dashboard = nodes, patience, dashboard
        self._nodes: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start it, and connect."""
        set_environment(
            **_HEALTH,
            RAY_health_check_failure_threshold=str(self._patience),
            RAY_num_workers_soft_limit=_IDLE_PROCESSES,
        )
        folder = self._stack.enter_context(private_folder())
        self._stack.enter_context(own_address_file(folder))
        head = {
            "num_cpus": 0,
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": self._dashboard,
            "dashboard_port": None,  # any that is free: there may be another cluster's on this machine
            "temp_dir": folder,
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._stack.callback(self._cluster.shutdown)
        for _ in range(self._first):
            self.add(wait=False)
        self._cluster.wait_for_nodes()
        ray.init(self._cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        self._stack.callback(ray.shutdown)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def nodes(self) -> list[str]:
        """The nodes that are there, the oldest first."""
        return list(self._nodes)

    def add(self, wait: bool = True) -> str:
        """Another node."""
        node = self._cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES, wait=wait)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def drain(self, node: str, deadline_s: float) -> None:
        """Announce that a node goes in ``deadline_s``, as a cloud's notice does."""
        drain(self._cluster.gcs_address, node, time.time() + deadline_s, "spot instance interruption")

    def halt(self, node: str) -> None:
        """Stop a node's worker without ending it, as a fault of its device does."""
        raylets = [info.process.pid for infos in self._nodes[node].all_processes.values() for info in infos]
        for pid in [pid for raylet in raylets for pid in _descendants(raylet)]:
            with contextlib.suppress(OSError):
                if b"RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGSTOP)

    def kill(self, node: str) -> None:
        """Take a node away, with every process on it at once, as when its host goes."""
        gone = self._nodes.pop(node)
        raylets = [info.process.pid for infos in gone.all_processes.values() for info in infos]
        for pid in raylets + [pid for raylet in raylets for pid in _descendants(raylet)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(gone, allow_graceful=False)

    def lose_head(self) -> None:
        """Kill Ray's control store, as when the head's pod goes; it has a memory only with RAY_REDIS_ADDRESS."""
        self._cluster.head_node.kill_gcs_server(check_alive=False)

    def return_head(self) -> None:
        """Start it again, at the same address. In the main thread: Ray's servers die with the thread that started them."""
        self._cluster.head_node.start_gcs_server()


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found
