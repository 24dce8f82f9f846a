"""A Ray cluster whose nodes are raylets on this machine, for drills (runs with real faults). Nodes can be drained, killed and
added.

The only file that uses Ray's cluster utilities.
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

from springtide.ray._ray_private import Cluster
from springtide.ray.cluster.nodes import drain
from springtide.ray.cluster.session import (
    NAMESPACE,
    files_of_ray,
    own_address_file,
    private_folder,
    private_network,
    set_environment,
    temporary_environment,
)

_STORE_BYTES = 100 * 2**20
_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
}
_IDLE_PROCESSES = "4"
"""Idle worker processes kept on each node. On a head without CPUs Ray would keep none by default, and each actor there would
wait for a new process."""


class LocalCluster:
    """A Ray head node, further nodes with one CPU each, and this process as the driver. With ``gpus``, each node has two CPUs
    and one GPU. A context manager; one per process."""

    dashboard_url = ""
    """Host and port of Ray's dashboard; empty without one."""

    def __init__(
        self, nodes: int, patience: int = 2, dashboard: bool = False, gpus: int = 0, head_cpus: int = 0
    ) -> None:
        """Set the size of the cluster, which ``__enter__`` starts.

        Args:
            nodes: number of nodes at the start, without the head.
            patience: consecutive seconds without an answer after which a node counts as dead; a busy head needs more where
                many processes share few cores.
            dashboard: start Ray's dashboard. Tests of plain Ray Train use its state API to find what a stopped run has left.
            gpus: GPUs of this machine. Each node gets one GPU for itself, so there can be at most this many nodes at a time.
                With 0, nodes have no GPU.
            head_cpus: CPUs of the head. With 0, workers run on the other nodes only.
        """
        self._first, self._patience, self._dashboard, self._gpus = nodes, patience, dashboard, gpus
        self._head_cpus = head_cpus
        self._gpu_of: dict[str, int] = {}
        self._nodes: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start the cluster and connect to it."""
        set_environment()
        threshold = {"RAY_health_check_failure_threshold": str(self._patience)}
        more = {**_HEALTH, **threshold, "RAY_num_workers_soft_limit": _IDLE_PROCESSES}
        self._stack.enter_context(temporary_environment(more))
        folder = self._stack.enter_context(private_folder())
        self._stack.enter_context(own_address_file(folder))
        self._stack.enter_context(private_network(folder))
        head = {
            "num_cpus": self._head_cpus,
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": self._dashboard,
            "dashboard_port": None,  # any free port: another cluster's dashboard may run here
            "temp_dir": files_of_ray(folder),
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._stack.callback(self._cluster.shutdown)
        for _ in range(self._first):
            self.add(wait=False)
        self._cluster.wait_for_nodes()
        context = ray.init(self._cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        self.dashboard_url = context.dashboard_url or ""
        self._stack.callback(ray.shutdown)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def nodes(self) -> list[str]:
        """Ids of the current nodes without the head, the oldest first."""
        return list(self._nodes)

    def add(self, wait: bool = True) -> str:
        """Add a node; return its id."""
        has: dict[str, Any] = {"num_cpus": 1}
        if self._gpus:
            gpu = min(set(range(self._gpus)) - set(self._gpu_of.values()))
            has |= {"num_cpus": 2, "num_gpus": 1, "env_vars": {"CUDA_VISIBLE_DEVICES": str(gpu)}}
        node = self._cluster.add_node(**has, object_store_memory=_STORE_BYTES, wait=wait)
        if self._gpus:
            self._gpu_of[node.node_id] = gpu
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def drain(self, node: str, deadline_s: float) -> None:
        """Announce that a node leaves in ``deadline_s`` seconds, as a cloud's preemption notice does."""
        drain(self._cluster.gcs_address, node, int((time.time() + deadline_s) * 1000), "spot instance interruption")

    def halt(self, node: str) -> None:
        """Suspend a node's worker without ending it (SIGSTOP), as a device fault does."""
        for infos in self._nodes[node].all_processes.values():
            for info in infos:
                for pid in _workers_below(info.process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)

    def kill(self, *nodes: str) -> None:
        """Remove nodes and kill all their processes at once, as when their hosts are lost."""
        for node in nodes:
            self._signal(node, signal.SIGKILL)
        for node in nodes:
            self._cluster.remove_node(self._nodes.pop(node), allow_graceful=False)
            self._gpu_of.pop(node, None)

    def _roots(self, node: str) -> list[int]:
        """Return the pids of the Ray processes that were started for a node, such as its raylet. Their child processes are left
        out."""
        return [info.process.pid for infos in self._nodes[node].all_processes.values() for info in infos]

    def _signal(self, node: str, number: signal.Signals) -> None:
        """Send a signal to all processes of a node."""
        roots = self._roots(node)
        for pid in roots + [pid for root in roots for pid in _descendants(root)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def lose_head(self) -> None:
        """Kill Ray's control store, as when the head's pod is lost. The store's data survives only in an external Redis
        (RAY_REDIS_ADDRESS)."""
        self._cluster.head_node.kill_gcs_server(check_alive=False)

    def return_head(self) -> None:
        """Restart Ray's control store at the same address. Call it in the main thread: Ray's servers die with the thread
        that started them."""
        self._cluster.head_node.start_gcs_server()


def kill_worker() -> int:
    """Kill one worker of this driver's private cluster with SIGKILL; return its pid. Returns 0 if no worker is a descendant of
    this process, as on a cluster that another process has started."""
    for pid in _workers_below(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return pid
    return 0


def _workers_below(pid: int) -> list[int]:
    """Return the pids of workers of Ray Train among the descendants of the process ``pid``."""
    found = []
    for one in _descendants(pid):
        with contextlib.suppress(OSError):
            if b"RayTrainWorker" in Path(f"/proc/{one}/cmdline").read_bytes():
                found.append(one)
    return found


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found
