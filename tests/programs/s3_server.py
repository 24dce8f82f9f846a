"""A real S3 server (SeaweedFS) on loopback, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
from ports import reserve

from springtide.storage import s3

_SECRET = {"accessKey": "springtide", "secretKey": "for-tests-only"}


class Server:
    """SeaweedFS with the buckets ``checkpoints`` and ``shards``, its data in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = dict(zip(("master", "volume", "filer", "s3", "admin"), reserve(5), strict=True))
        self.url = f"http://127.0.0.1:{self._ports['s3']}"
        self._process: subprocess.Popen[bytes] | None = None
        identity = {"name": "admin", "credentials": [_SECRET], "actions": ["Admin", "Read", "List", "Tagging", "Write"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def start(self) -> None:
        """Start it, or start it again; returns when it answers."""
        weed = shutil.which("weed") or str(Path(sys.executable).parent / "weed")
        off = ["master.telemetry=false", "s3.port.iceberg=0", "s3.port.lance=0", "webdav=false", "admin.ui=false"]
        command = [weed, "-logtostderr=true", "mini", f"-dir={self._folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-{name}.port={number}" for name, number in self._ports.items()]
        command += [
            f"-s3.config={self._folder}/s3.json",
            "-bucket=checkpoints,shards",
            *(f"-{switch}" for switch in off),
        ]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        with (self._folder / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env={**environment, "GOMEMLIMIT": "600MiB"}, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 300
        options = {"key": _SECRET["accessKey"], "secret": _SECRET["secretKey"], "endpoint_url": self.url}
        while True:
            try:
                found = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, **options).ls("")
                if "checkpoints" in found:
                    return
            except Exception:
                assert self._process.poll() is None, (self._folder / "weed.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the S3 server did not answer within five minutes"
            time.sleep(0.2)  # until the server answers; nothing else is waited for

    def kill(self) -> None:
        """As a power failure would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(20)

    def stop(self) -> None:
        """End it."""
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:  # one that was killed before may linger
            self.kill()


def environment(url: str) -> dict[str, str]:
    """What names a server at ``url``, and its credentials."""
    return {
        "AWS_ACCESS_KEY_ID": _SECRET["accessKey"],
        "AWS_SECRET_ACCESS_KEY": _SECRET["secretKey"],
        "AWS_ENDPOINT_URL": url,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@contextlib.contextmanager
def pointing_to(url: str) -> Iterator[None]:
    """The environment names the server at ``url`` meanwhile, and no client of another is kept."""
    before = {name: os.environ.get(name) for name in environment(url)}
    os.environ.update(environment(url))
    _forget()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        _forget()


def _forget() -> None:
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    s3._bucket.cache_clear()


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """A server out of ``folder``, which the environment names meanwhile."""
    server = Server(folder)
    server.start()
    try:
        with pointing_to(server.url):
            yield server
    finally:
        server.stop()
