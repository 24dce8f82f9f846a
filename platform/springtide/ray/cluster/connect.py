"""Connect to the Ray cluster that the user names; what is wrong with its address, token or versions is said in one sentence."""

from __future__ import annotations

import os
import re
import socket
import time

import ray
from ray.exceptions import AuthenticationError, RayError

from springtide.errors import ConfigError, explain
from springtide.ray._ray_private import GcsClient

AUTH_MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_ANSWER_S = 10.0
"""How long a named cluster may take until it listens [s]: its head may be starting."""
_RETRY_S = 0.2
_OF_HEAD = "set RAY_ADDRESS to HOST:PORT of a head that runs (`ray start --head` prints it); is there a firewall?"
_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")
"""What Ray's error about other versions says of the cluster, and then of this process."""


def connect(address: str, **how: object) -> str:
    """Connect to the cluster at ``address``, as ``ray.init`` does with ``how``, and return its dashboard's URL. Raises
    ConnectionError if nothing answers, ConfigError if the cluster has other versions of Ray and Python than this process, or
    refuses its token."""
    if is_host_and_port(address):  # Ray itself tries a wrong address or token again, for minutes, and hides the reason
        wait_for_port(address)
        check_token(address)
    try:
        return ray.init(address=address, **how).dashboard_url or ""
    except RuntimeError as error:
        versions = _VERSIONS.findall(str(error))
        if len(versions) != 2:
            raise
        (ray_there, python_there), (ray_here, python_here) = versions
        limit = (
            f"runs Ray {ray_there} on Python {python_there}; this process has Ray {ray_here} on Python {python_here}"
        )
        remedy = "use an environment with the cluster's versions, or let the run start there: docs/how-to/jobs.md"
        raise ConfigError(explain("RAY_ADDRESS", address, limit, remedy)) from None


def is_host_and_port(address: str) -> bool:
    """Return whether an address of a cluster is HOST:PORT, and not ``auto`` or a URL.

    >>> is_host_and_port("10.0.0.5:6379"), is_host_and_port("ray://10.0.0.5:10001"), is_host_and_port("auto")
    (True, False, False)
    """
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal()


def check_token(address: str) -> None:
    """Raise ConfigError if the cluster at ``address`` refuses this process's token, ConnectionError if no Ray is there."""
    try:
        GcsClient(address=address).get_all_node_info(timeout=_ANSWER_S)
    except AuthenticationError as error:
        told = f"{_token_source()} is not the cluster's token ({str(error).splitlines()[0]})"
        remedy = "copy ~/.ray/auth_token of the cluster's head to this machine, and set RAY_AUTH_MODE=token"
        raise ConfigError(explain("RAY_ADDRESS", address, told, remedy)) from None
    except RayError as error:
        problem = f"what answers there is no Ray cluster of this version ({str(error).splitlines()[0]})"
        raise ConnectionError(explain("RAY_ADDRESS", address, problem, _OF_HEAD)) from None


def wait_for_port(address: str, patience_s: float = _ANSWER_S) -> None:
    """Raise ConnectionError if nothing listens at ``address`` for ``patience_s``, while a head may be starting."""
    host, _, port = address.rpartition(":")
    until_s = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=patience_s).close()
            return
        except OSError as error:
            if time.monotonic() > until_s or isinstance(error, socket.gaierror):
                problem = f"no Ray cluster answers there ({error})"
                raise ConnectionError(explain("RAY_ADDRESS", address, problem, _OF_HEAD)) from None
        time.sleep(_RETRY_S)


def _token_source() -> str:
    """Return where this process has its token from; never the token."""
    if os.environ.get(AUTH_MODE, "").lower() != "token":
        return f"{AUTH_MODE} here is not token: what was sent"
    if os.environ.get(TOKEN):
        return f"what {TOKEN} has"
    return f"what is in {os.environ.get(TOKEN_FILE) or os.path.expanduser('~/.ray/auth_token')}"
