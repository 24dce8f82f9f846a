"""One Ray cluster for all tests that do not kill it, and one of a single node for submitted jobs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ports import reserve

from springtide.ray.cluster.local import LocalCluster

NODES = 3
PATIENCE_S = 60
"""Seconds without an answer before a node counts as dead: no test with this cluster kills a node, and cores may be busy."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The dashboard's URL of a cluster of a head and three nodes with one CPU each; this process is connected to it."""
    before = set(os.environ)
    with LocalCluster(NODES, PATIENCE_S, dashboard=True, head_cpus=1) as local:
        for name in [name for name in os.environ if name.startswith("RAY_health_check_") and name not in before]:
            del os.environ[name]  # clusters that tests start have their own patience
        yield f"http://{local.dashboard_url}"


def answers(url: str) -> bool:
    """Return whether a server answers, in whatever way."""
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@pytest.fixture
def one_node() -> Iterator[str]:
    """The dashboard's URL of a cluster of one node, to submit jobs to. Nodes that share a machine share the folder of a job's
    files, and each removes it once to write it anew: under the job, if that runs already."""
    gcs, dashboard, agent = reserve(3)
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    ports = [f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}", "--num-cpus=4"]
    # not below tmp_path: sockets have short paths
    with tempfile.TemporaryDirectory(prefix="one-node-", ignore_cleanup_errors=True) as folder:
        command = [*ray, *ports, f"--temp-dir={folder}", "--include-dashboard=true"]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        try:
            url = f"http://127.0.0.1:{dashboard}"
            while not answers(url):
                assert process.poll() is None, f"ray start ended with {process.returncode}"
                time.sleep(0.1)  # between tries
            yield url
        finally:
            # asked to end, it takes half a minute
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait(60)
