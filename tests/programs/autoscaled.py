"""A Ray cluster of this machine whose nodes Ray's own autoscaler (version 2) starts and ends, by what is requested of it.

Ray's ``AutoscalingCluster`` needs a file that the wheel of 2.60 lacks (``fake_multi_node/example.yaml``), and begins with ``ray
stop --force``, which would end every other cluster of this machine. Its node provider works: it starts a raylet for each node.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from springtide.ray._ray_private import Cluster
from springtide.ray.cluster.nodes import live
from springtide.ray.cluster.session import (
    NAMESPACE,
    files_of_ray,
    own_address_file,
    private_folder,
    private_network,
    set_environment,
)

_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
_HEAD_TYPE, _HEAD_ID = "ray.head.default", "f" * 51 + "0" * 5
_STORE_BYTES = 100 * 2**20
_OF_THE_HEAD = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID, "RAY_CLOUD_INSTANCE_ID": _HEAD_ID}


@contextlib.contextmanager
def autoscaled(types: Mapping[str, tuple[int, int]], idle_s: float = 5.0) -> Iterator[Any]:
    """Start a head without CPUs and its autoscaler, and connect to it. ``types``: market -> fewest and most nodes of it, each
    with one CPU and the market as its label; ``idle_s``: after how long the autoscaler ends an idle node that nobody
    requests."""
    set_environment(
        RAY_enable_autoscaler_v2="1",
        RAY_FAKE_CLUSTER="1",
        AUTOSCALER_UPDATE_INTERVAL_S="1",
        RAY_health_check_initial_delay_ms="1000",
        RAY_health_check_period_ms="1000",
        RAY_health_check_timeout_ms="1000",
        RAY_health_check_failure_threshold="3",
        RAY_num_workers_soft_limit="4",
    )
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(private_folder())
        stack.enter_context(own_address_file(folder))
        stack.enter_context(private_network(folder))
        port = _free_port()
        config = Path(folder) / "autoscaler.json"
        config.write_text(json.dumps(_config(types, idle_s, f"127.0.0.1:{port}")))
        head = {
            "num_cpus": 0,
            "gcs_server_port": port,
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": False,
            "dashboard_port": None,
            "temp_dir": files_of_ray(folder),
            "autoscaling_config": str(config),
            "env_vars": _OF_THE_HEAD,
        }
        with _variables(_OF_THE_HEAD):
            cluster = Cluster(initialize_head=True, head_node_args=head)
        stack.callback(cluster.shutdown)
        ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        stack.callback(ray.shutdown)
        yield cluster


def markets() -> dict[str, str]:
    """Return the live nodes, without the head, and the market of each."""
    return {
        node["NodeID"]: node["Labels"].get("ray.io/market-type", "")
        for node in live()
        if "node:__internal_head__" not in node["Resources"]
    }


def wait_for(what: Any, timeout_s: float = 60.0) -> Any:
    """Wait until ``what()`` is true; return it."""
    until_s = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < until_s, f"not within {timeout_s:g} s: {markets()}"
        time.sleep(0.1)
    return found


def _config(types: Mapping[str, tuple[int, int]], idle_s: float, gcs: str) -> dict[str, Any]:
    workers = {
        market: {
            "resources": {"CPU": 1, "object_store_memory": _STORE_BYTES},
            "labels": {"ray.io/market-type": market},
            "node_config": {},
            "min_workers": least,
            "max_workers": most,
        }
        for market, (least, most) in types.items()
    }
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    provider = {
        "type": "external",
        "module": _PROVIDER,
        "gcs_address": gcs,
        "head_node_id": _HEAD_ID,
        "launch_multiple": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    commands = ("setup_commands", "head_setup_commands", "worker_setup_commands", "initialization_commands")
    return {
        **{name: [] for name in (*commands, "head_start_ray_commands", "worker_start_ray_commands")},
        **{name: {} for name in ("file_mounts", "docker")},
        "cluster_synced_files": [],
        "cluster_name": "autoscaled",
        "max_workers": sum(most for _, most in types.values()),
        "idle_timeout_minutes": idle_s / 60,
        "provider": provider,
        "available_node_types": workers | {_HEAD_TYPE: head},
        "head_node_type": _HEAD_TYPE,
        "upscaling_speed": 1.0,
        "auth": {},
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
