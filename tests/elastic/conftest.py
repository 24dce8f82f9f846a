"""One Ray cluster for all tests that do not kill it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from springtide.on_ray.cluster.local import LocalCluster

NODES = 3
PATIENCE_S = 60
"""Seconds without an answer before a node counts as dead: no test with this cluster kills a node, and cores may be busy."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The dashboard's URL of a cluster of a head without CPUs and three nodes with one CPU each; this process is connected."""
    with LocalCluster(NODES, PATIENCE_S, dashboard=True) as local:
        yield f"http://{local.dashboard_url}"
