"""A real S3 server (SeaweedFS) on loopback, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec


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


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[None]:
    """Serve the buckets ``checkpoints`` and ``shards`` out of ``folder``; the environment names server and credentials."""
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
        yield
    finally:
        server.terminate()
        server.wait(20)
        log.close()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
            os.environ.pop(name, None)
