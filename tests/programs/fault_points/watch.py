"""The other end of the fault points: a server that each process of a run reports to, and waits for, at each point."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from springtide.faults import Point, When, arm

_HEARD_S = 10.0


class Reached(NamedTuple):
    """A process that has reached a fault point, and waits there."""

    point: Point
    when: When
    pid: int

    @property
    def name(self) -> str:
        """The point's name, as ``restore-before``."""
        return name_of(self.point, self.when)


def name_of(point: Point, when: When) -> str:
    """Return the name of a point and when: ``restore-before``, ``first-collective-after``."""
    return f"{point}-{when}".replace("_", "-")


@contextlib.contextmanager
def watch(on_reached: Callable[[Reached], None]) -> Iterator[None]:
    """Arm this process, and so every run that it starts, in the block. ``on_reached`` is called in a thread of its own for each
    process that reaches a point; the process goes on when it returns."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(_HEARD_S)
            with contextlib.suppress(OSError, ValueError):  # it was killed while it reported, or while it waited
                data = b"".join(iter(lambda: self.request.recv(1024), b""))
                point, when, pid = json.loads(data)
                on_reached(Reached(point, when, pid))
                self.request.sendall(b"+")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True
        request_queue_size = socket.SOMAXCONN

    with tempfile.TemporaryDirectory(prefix="springtide-points-") as folder:
        address = str(Path(folder) / "points")
        with Server(address, Handler) as server, _serving(server):
            arm(address)
            try:
                yield
            finally:
                arm("")


@contextlib.contextmanager
def _serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="springtide-points", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
