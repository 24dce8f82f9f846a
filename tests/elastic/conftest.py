"""One Ray cluster for all tests that do not kill it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from springtide.on_ray.cluster.local import LocalCluster

NODES = 3
PATIENCE_S = 60
"""Seconds without an answer before a node counts as dead: no test with this cluster kills a node, and cores may be busy."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The dashboard's URL of a cluster of a head without CPUs and three nodes with one CPU each; this process is connected."""
    before = set(os.environ)
    with LocalCluster(NODES, PATIENCE_S, dashboard=True) as local:
        for name in [name for name in os.environ if name.startswith("RAY_health_check_") and name not in before]:
            del os.environ[name]  # clusters that tests start have their own patience
        yield f"http://{local.dashboard_url}"
