"""What all tests share: a tiny config, its prepared dataset, and a place of their own to write to."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import process_guard
import pytest
import s3_server
import second_try
import times
from hypothesis import settings

# every machine the same: a token of this test run, not of the user's home, no reports to anyone, no server retries that take
# minutes; and one thread per process: processes that share two cores would spin for each
# other's threads, which made some tests twenty times slower
os.environ.update(
    OMP_NUM_THREADS="1",
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN=os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),  # one for all processes of pytest-xdist
    RAY_USAGE_STATS_ENABLED="0",
    MLFLOW_DISABLE_TELEMETRY="true",
    MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
    MLFLOW_HTTP_REQUEST_TIMEOUT="5",
)
# a shell ignores Ctrl-C for what it runs in the background, and that holds for all processes that the tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("RAY_ADDRESS", None)
os.environ.pop("MLFLOW_TRACKING_URI", None)

from prepared import prepare

from springtide import config as configs
from springtide.config import Config

if TYPE_CHECKING:
    from springtide.distributed import World


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins that lie beside this file."""
    for plugin in (process_guard, second_try):
        config.pluginmanager.register(plugin, plugin.__name__)
    if config.getoption("--times"):
        config.pluginmanager.register(times.Times(), "times")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--full`` and ``--times``."""
    parser.addoption("--full", action="store_true", help="run what is too long for every day, too")
    parser.addoption("--times", action="store_true", help="print seconds by folder and the slowest tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave it out otherwise."""
    if not config.getoption("--full"):
        # not ``item.keywords``: those have the names of folders, too
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]


settings.register_profile("springtide", deadline=None, database=None)  # times are for benchmarks
settings.load_profile("springtide")


@pytest.fixture
def ray_authentication() -> Iterator[None]:
    """Make Ray read its mode and token again when the test has restored the environment: it keeps what it has read, and this
    process may be a driver."""
    yield
    from springtide.ray._ray_private import read_authentication

    read_authentication()


@pytest.fixture
def one() -> Iterator[World]:
    """This process as a group of its own."""
    import torch.distributed as dist

    from springtide.distributed import world

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield world("cpu")
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the datasets of this test run are prepared, once each."""
    return tmp_path_factory.mktemp("datasets")


@pytest.fixture(scope="session")
def tiny_dataset(datasets: Path) -> str:
    """The URL of the dataset of the tiny recipe. A search for it reads and hashes a thousand files: once is enough."""
    return prepare(configs.recipes.tiny().override({"shards.root": str(datasets)})).shards.dataset


@pytest.fixture
def tiny(tmp_path: Path, datasets: Path, tiny_dataset: str) -> Config:
    """The tiny recipe, prepared, with its runs below ``tmp_path`` and nothing reported to MLflow."""
    changes = {
        "shards.root": str(datasets),
        "shards.dataset": tiny_dataset,
        "run.root": str(tmp_path / "runs"),
        "feed.cache": str(tmp_path / "cache"),
        "track.mlflow_uri": "off",
        "track.progress": False,
    }
    return configs.recipes.tiny().override(changes)


@pytest.fixture
def poems(tiny: Config, datasets: Path) -> str:
    """The URL of a small dataset of another text, with the vocabulary and length of ``tiny``."""
    text = datasets / "poems.txt"
    if not text.exists():
        lines = (
            f"{verb} the {noun}, number {n}.\n" for n in range(400) for verb, noun in (("Sing", "sea"), ("Fear", "fog"))
        )
        (datasets / "parts").mkdir()
        for part in range(40):
            (datasets / "parts" / f"{part}.txt").write_text(f"Song {part}\n" + "".join(itertools.islice(lines, 20)))
        text.touch()
    changes = {"shards.dataset": "", "corpus.source": str(datasets / "parts"), "shards.heldout_fraction": 0.1}
    return prepare(tiny.override(changes)).shards.dataset


@pytest.fixture(scope="session")
def small_disk() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command that sees a real file system at a path, of half a megabyte if no size is given, in a namespace of its
    own."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount in a namespace of their own")

    def run(path: Path, command: list[str], size: str = "512k") -> subprocess.CompletedProcess[str]:
        path.mkdir()
        inside = [unshare, "-rm", "sh", "-c", f'mount -t tmpfs -o size={size} none {path} && exec "$0" "$@"', *command]
        return subprocess.run(inside, capture_output=True, text=True, timeout=500, check=False)

    return run


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``s3://checkpoints`` on a real S3 server (SeaweedFS) that lives as long as the test run."""
    with s3_server.serve(tmp_path_factory.mktemp("s3")):
        yield "s3://checkpoints"
