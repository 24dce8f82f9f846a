"""The check of ``springtide doctor`` that measures the network to another machine, where the same command runs."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
from collections.abc import Mapping

from springtide.app.doctor import Check
from springtide.errors import ConfigError, explain

WAIT_S = 180.0
"""After this time the check is cut off: it waits up to two minutes for the other machine [s]."""
_LEAST_BYTES_PER_S = 100 * 2**20
"""Slower, the gradient of a model of 100M parameters (fp32) takes more than four seconds per step."""
_CLOCKS_APART_S = 1.0


class PeerCheck:
    """Measures the way between two machines."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        """``address``: HOST:PORT of one of the two, which listens there meanwhile. Raises ConfigError if it is none."""
        self._host, _, port = address.rpartition(":")
        if not self._host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(
                explain("--peer", address, "is not HOST:PORT", "such as 10.0.0.5:29400, on both machines")
            )
        self._address, self._port, self._environment = address, int(port), environment

    def make(self) -> list[Check]:
        """Meet the other machine, sum a gradient with it a few times, and compare clocks."""
        rank = 0 if self._is_here() else 1
        command = [sys.executable, "-m", "springtide.dist.link_speed", f"tcp://{self._address}", str(rank)]
        environment = {**self._environment, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=WAIT_S - 10
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
            remedy = "the same command on the other machine within two minutes; its firewall; GLOO_SOCKET_IFNAME"
            return [Check("peer", "fail", f"nobody was met at {self._address}: {last}", "an answer", remedy)]
        facts = json.loads(done.stdout)
        return [network_check(facts["bytes_per_s"]), peer_clock_check(facts["ahead_s"], facts["error_s"])]

    def _is_here(self) -> bool:
        """Return whether this machine has the address, and nobody listens there yet."""
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(
                self._host.strip("[]"), self._port, type=socket.SOCK_STREAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                return False
            raise
        return True


def network_check(bytes_per_s: float) -> Check:
    """Return the check of a measured speed."""
    slow = bytes_per_s < _LEAST_BYTES_PER_S
    remedy = "a faster network, nodes in one zone; GLOO_SOCKET_IFNAME names the interface to use" if slow else ""
    figure, limit = f"{bytes_per_s / 2**20:.0f} MiB/s summed by both machines", f"{_LEAST_BYTES_PER_S / 2**20:g} MiB/s"
    return Check("peer, network", "warn" if slow else "ok", figure, limit, remedy)


def peer_clock_check(ahead_s: float, error_s: float) -> Check:
    """Return the check of two clocks.

    Args:
        ahead_s: how far the other machine's is ahead [s].
        error_s: by how much that may be wrong [s].

    Examples:
        >>> from springtide.app.doctor_peer import peer_clock_check
        >>> peer_clock_check(-0.0021, 0.0004).figure
        "the other machine's is behind by 2.1 ms, give or take 0.4 ms"
        >>> peer_clock_check(75.0, 0.001).status
        'warn'
    """
    apart = abs(ahead_s) - error_s > _CLOCKS_APART_S
    way, remedy = "ahead" if ahead_s > 0 else "behind", "chrony or ntpd on both machines" if apart else ""
    figure = f"the other machine's is {way} by {_span(abs(ahead_s))}, give or take {_span(error_s)}"
    return Check("peer, clock", "warn" if apart else "ok", figure, f"{_CLOCKS_APART_S:g} s", remedy)


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
