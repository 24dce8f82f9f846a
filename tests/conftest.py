"""What all tests share: a tiny config, its prepared dataset, and a place of their own to write to."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
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
from springtide.dataset import prepare

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
    return prepare(configs.override(tiny, changes)).shards.dataset


def free_ports(number: int, low: int = 20_000, high: int = 22_000) -> list[int]:
    """Loopback ports that nobody listens on, away from those Ray takes; port + 10000 is free too."""
    found: list[int] = []
    for port in range(low + os.getpid() % 1000, high):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        found.append(port)
        if len(found) == number:
            return found
    raise RuntimeError(f"no {number} free ports between {low} and {high}")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``s3://checkpoints`` on a real S3 server (SeaweedFS) that lives as long as the test run."""
    import fsspec

    folder = tmp_path_factory.mktemp("s3")
    master, volume, filer, port, admin = free_ports(5)
    secret = {"accessKey": "springtide", "secretKey": "for-tests-only"}
    identity = {"name": "admin", "credentials": [secret], "actions": ["Admin", "Read", "List", "Tagging", "Write"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    weed = shutil.which("weed") or str(Path(sys.executable).parent / "weed")
    ports = {"master": master, "volume": volume, "filer": filer, "s3": port, "admin": admin}
    off = ["master.telemetry=false", "s3.port.iceberg=0", "s3.port.lance=0", "webdav=false", "admin.ui=false"]
    command = [weed, "-logtostderr=true", "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-{name}.port={number}" for name, number in ports.items()]
    command += [f"-s3.config={folder}/s3.json", "-bucket=checkpoints,shards", *(f"-{switch}" for switch in off)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    log = (folder / "weed.log").open("wb")
    server = subprocess.Popen(command, env={**environment, "GOMEMLIMIT": "600MiB"}, stdout=log, stderr=log)
    os.environ.update(
        AWS_ACCESS_KEY_ID=secret["accessKey"],
        AWS_SECRET_ACCESS_KEY=secret["secretKey"],
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_DEFAULT_REGION="us-east-1",
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if "checkpoints" in fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False).ls(""):
                    break
            except Exception:
                assert server.poll() is None, (folder / "weed.log").read_text()[-2000:]
                assert time.monotonic() < deadline, "the S3 server did not answer within a minute"
            time.sleep(0.2)  # until the server answers; nothing else is waited for
        yield "s3://checkpoints"
    finally:
        server.terminate()
        server.wait(20)
        log.close()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
            os.environ.pop(name, None)
