"""Ports for servers that cannot let the kernel choose one."""

from __future__ import annotations

import socket
from pathlib import Path

_FIRST, _LAST = 20_000, 22_000
"""Away from those that Ray takes; and below those that the kernel gives to whoever connects, as is 10,000 more."""
_held: list[socket.socket] = []


def reserve(number: int) -> list[int]:
    """Loopback ports that nobody listens on, and that no other process which asks here gets until this one has ended; port +
    10000 is free too. A port that is only looked for may be taken until it is bound."""
    found: list[int] = []
    for port in range(_FIRST, _LAST):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0springtide-port-{port}")  # abstract: gone with its process, however that ends
            with socket.socket() as one, socket.socket() as other:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
        except OSError:
            name.close()
            continue
        _held.append(name)
        found.append(port)
        if len(found) == number:
            return found
    kernels = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    raise RuntimeError(f"no {number} free ports between {_FIRST} and {_LAST} (the kernel gives {'-'.join(kernels)})")
