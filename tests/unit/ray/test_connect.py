"""A cluster that cannot be used: each reason in a sentence, with both sides, before anything is started."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import utils
from ray.exceptions import AuthenticationError, RpcError

from springtide.config import recipes
from springtide.errors import ConfigError
from springtide.ray.cluster import session


@pytest.fixture
def listening() -> Any:
    """The address of a port where somebody listens, who is no Ray."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_an_unreachable_address_is_reported_within_the_patience(listening: str) -> None:
    """Where nobody listens is said within the patience and a wrong name at once."""
    session.wait_for_port(listening)
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1:{server.getsockname()[1]}"
    begin_s = time.monotonic()
    with pytest.raises(ConnectionError, match=rf"RAY_ADDRESS = '{closed}': .*refused.*HOST:PORT"):
        session.wait_for_port(closed, 0.3)
    assert time.monotonic() - begin_s < 5
    with pytest.raises(ConnectionError, match="Ray cluster"):
        session.wait_for_port("no such host:6379")


def test_other_versions_are_said_of_both_sides(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own check makes the error, so a change of its words is seen here."""

    def init(**_: Any) -> None:
        utils.check_version_info({"ray_version": "2.59.1", "python_version": "3.10.4"}, "node 10.0.0.5")

    monkeypatch.setattr(session, "check_token", lambda address: None)
    monkeypatch.setattr(ray, "init", init)
    there, here = "Ray 2.59.1 on Python 3.10.4", rf"Ray {ray.__version__} on Python 3\.\d+\.\d+"
    with pytest.raises(ConfigError, match=rf"{there}.*{here}.*jobs\.md"):
        session.connect(listening)

    def fail(**_: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(RuntimeError, match="something else"):
        session.connect(listening)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "hunter2"}, "what RAY_AUTH_TOKEN has is not the cluster's token"),
        (
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/x/token"},
            "what is in /x/token is not the cluster's token",
        ),
        ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE here is not token: what was sent is not"),
    ],
)
def test_a_wrong_token_is_named_by_its_place_and_never_shown(
    environment: dict[str, str], said: str, listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def refuse(**_: Any) -> None:
        raise AuthenticationError("the token is invalid")

    monkeypatch.setattr(session, "GcsClient", refuse)
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS = .*auth_token") as found:
        session.connect(listening)
    assert said in str(found.value)
    assert "hunter2" not in str(found.value)


def test_another_server_at_the_address_is_no_ray(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's client says so after 45 s, of which it has twenty tries."""

    def time_out(**_: Any) -> None:
        raise RpcError("Timed out while waiting for GCS to become available.")

    monkeypatch.setattr(session, "GcsClient", time_out)
    with pytest.raises(ConnectionError, match=r"\(Timed out.*HOST:PORT"):
        session.connect(listening)


def test_ray_processes_import_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes import nothing from the current folder unless this one does.

    A part of Ray's dashboard is started as ``python -c``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with session._safe_path():
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with session._safe_path():
        assert "PYTHONSAFEPATH" not in os.environ


def test_cluster_keeps_the_current_folder_out_of_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray adds the current folder to the search path of a job in ``ray.init``, unless the job's list refuses it."""
    jobs: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(session, "connect", lambda address, job_config, **_: jobs.append(job_config) or "")
    with session.cluster(recipes.tiny()):
        pass
    [job] = jobs
    job._py_driver_sys_path.extend([str(tmp_path)])
    assert str(tmp_path) not in job._py_driver_sys_path
