"""A search for connections leaves no file open: each worker group makes one, and a process outlives hundreds of groups."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from springtide.distributed import connections


def test_connections_are_found_and_no_other_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    with (
        (tmp_path / "log").open(),
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        before = len(os.listdir("/proc/self/fd"))
        found = connections._connections()
        assert len(os.listdir("/proc/self/fd")) == before + len(found)
        assert found
        for one in found.values():
            one.close()
