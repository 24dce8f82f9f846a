"""A real MLflow server, on PostgreSQL where that and its driver are installed, else on sqlite."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
from ports import reserve

from springtide.storage import Folder

_NOBODY = 65534
"""PostgreSQL does not run as root."""


def history(uri: str, run: Folder, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric of the MLflow run that ``run`` reports to, in the order of the server."""
    from mlflow import MlflowClient

    found = MlflowClient(uri).get_metric_history(run.read_json("mlflow.json")["run_id"], name)
    return [(metric.step, metric.value) for metric in found]


def postgres_programs() -> Path | None:
    """The folder of ``initdb`` and ``postgres``; None if they, or Python's driver for them, are missing."""
    if importlib.util.find_spec("psycopg2") is None:
        return None
    known = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    known += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((one for one in known if (one / "initdb").exists() and (one / "postgres").exists()), None)


@contextlib.contextmanager
def postgres(programs: Path) -> Iterator[str]:
    """The URI of an empty database of a PostgreSQL server on loopback, which ends with the block."""
    user = _NOBODY if os.getuid() == 0 else os.getuid()
    [port] = reserve(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, user, -1)
        initialise = [programs / "initdb", "-D", folder / "data", "-U", "ml", "--auth=trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(initialise, user=user, cwd=folder, capture_output=True, check=True)
        command = [programs / "postgres", "-D", folder / "data", "-p", str(port), "-h", "127.0.0.1", "-F"]
        command += ["-c", "unix_socket_directories="]
        log = folder / "postgres.log"
        with (
            log.open("wb") as file,
            subprocess.Popen(
                command, user=user, cwd=folder, stdout=file, stderr=file, start_new_session=True
            ) as server,
        ):
            try:
                deadline = time.monotonic() + 300
                while b"ready to accept connections" not in log.read_bytes():
                    assert server.poll() is None, log.read_text()[-2000:]
                    assert time.monotonic() < deadline, "PostgreSQL did not start within five minutes"
                    time.sleep(0.05)  # until it is ready
                yield f"postgresql+psycopg2://ml@127.0.0.1:{port}/postgres"
            finally:
                server.terminate()


@contextlib.contextmanager
def server(folder: Path, port: int, database: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """An MLflow server on ``port`` that answers; its processes end with the block. ``database``: URI; sqlite without it."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", database or f"sqlite:///{folder}/server.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (
        (folder / "server.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as process,
    ):
        try:
            _wait_for(process, port, folder / "server.log")
            yield process
        finally:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a server and its workers, as an outage does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for one in family:
            one.kill()
        psutil.wait_procs(family, timeout=20)


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 300
    while True:
        with (
            contextlib.suppress(OSError),  # its socket may be open before it can answer
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer,
        ):
            if answer.status == 200:
                return
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, "the MLflow server did not answer within five minutes"
        time.sleep(0.1)  # until the server answers
