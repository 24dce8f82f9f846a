"""What others of the machine and of its network can do with the clusters that springtide starts: prints JSON."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import stat
import subprocess
import sys
import tempfile

import psutil
import ray

from springtide import config as configs
from springtide.ray.cluster.local import LocalCluster
from springtide.ray.cluster.session import cluster, dashboard_hint

LOOPBACK = ("127.0.0.1", "::ffff:127.0.0.1", "::1")
_STRANGER = """
import sys
import tempfile
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)
    print("served")
except Exception as error:
    print(type(error).__name__)
"""


@ray.remote(num_cpus=0)
class _Worker:
    def pid(self) -> int:
        return os.getpid()


def _seen() -> dict[str, object]:
    worker = _Worker.remote()
    ray.get(worker.pid.remote())
    address = ray.get_runtime_context().gcs_address
    return {
        "address": address,
        "reachable": sorted(_reachable()),
        "without a token": _ask(address, RAY_AUTH_MODE="disabled"),
        "with another token": _ask(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="f" * 64),
        "with the token": _ask(address),
        "open to others": _open_to_others(),
        "hint": dashboard_hint(),
    }


def _reachable() -> set[str]:
    """Processes that other machines can connect to."""
    me = psutil.Process()
    found = set()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in process.net_connections("inet"):
                if one.status == "LISTEN" and one.laddr.ip not in LOOPBACK:
                    found.add(f"{process.name()} at {one.laddr.ip}")
    return found


def _ask(address: str, **more: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not more or not name.startswith("RAY_AUTH")}
    command = [sys.executable, "-c", _STRANGER, address]
    done = subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()[-200:]


def _open_to_others() -> list[str]:
    """Files of the cluster that another user of this machine could read or write: no folder above them keeps him out."""
    [folder] = glob.glob(f"{tempfile.gettempdir()}/springtide-ray-*")
    mode = os.stat(folder).st_mode
    assert os.path.isdir(f"{folder}/ray/session_latest/logs")
    return [folder] if stat.S_IMODE(mode) & 0o077 else []


def main() -> None:
    """One cluster of each kind, one after the other in one process."""
    found = {}
    with LocalCluster(1):
        found["drill"] = _seen()
    with cluster(configs.recipes.tiny().override({"elastic.max_workers": 1}), dashboard=False):
        found["train"] = _seen()
    found["left"] = sorted(name for name in os.environ if name.startswith("RAY_AUTH"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
