"""What all tests share: a tiny config, its prepared dataset, and a place of their own to write to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# every machine the same: no token of the user's home, no reports to anyone, no server retries that take minutes
os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    MLFLOW_DISABLE_TELEMETRY="true",
    MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
    MLFLOW_HTTP_REQUEST_TIMEOUT="5",
)
os.environ.pop("RAY_ADDRESS", None)
os.environ.pop("MLFLOW_TRACKING_URI", None)

from springtide import config as configs
from springtide.config import Config
from springtide.prepare import prepare

settings.register_profile("springtide", deadline=None, database=None)  # times are for benchmarks
settings.load_profile("springtide")


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the datasets of this test run are prepared, once each."""
    return tmp_path_factory.mktemp("datasets")


@pytest.fixture
def tiny(tmp_path: Path, datasets: Path) -> Config:
    """The tiny recipe, prepared, with its runs below ``tmp_path`` and nothing reported to MLflow."""
    changes = {
        "shards.root": str(datasets),
        "run.root": str(tmp_path / "runs"),
        "track.mlflow_uri": "off",
        "track.progress": False,
    }
    return prepare(configs.override(configs.recipes.tiny(), changes))
