"""One Ray cluster for all tests that do not kill it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from springtide import config as configs


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The dashboard's URL of a private cluster with four logical CPUs; this process is connected to it."""
    from springtide.on_ray.cluster.session import cluster

    with cluster(configs.recipes.tiny().override({"elastic.max_workers": 3})) as dashboard:
        yield f"http://{dashboard}"
