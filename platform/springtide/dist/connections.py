"""The connections between the ranks of a group, to cut them when the group has ended.

gloo closes its connections only when the process ends: a rank that knows of a lost peer keeps them open, and other ranks wait
for it in their collective as long as it lives. When connections are cut, every waiting rank fails at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import stat
from collections import Counter

import numpy as np

from springtide.dist.collectives import gathered

_OPEN_FILES = "/proc/self/fd"


class Connections:
    """This rank's connections to the other ranks. All ranks must create theirs together (a collective call)."""

    def __init__(self) -> None:
        mine = _connections()
        everyone = gathered(np.array(list(mine), dtype=np.uint64))
        ranks_that_have = Counter(np.concatenate(everyone).tolist())
        self._sockets = []
        for name, one in mine.items():
            if ranks_that_have[name] > 1:
                self._sockets.append(one)
            else:  # to Ray, or to a store
                one.close()

    def __len__(self) -> int:
        return len(self._sockets)

    def wait_until_lost(self) -> None:
        """Wait until a peer has closed its end, as when its process has ended; forever without peers."""
        poller = select.poll()
        for one in self._sockets:
            poller.register(one, select.POLLRDHUP)
        poller.poll()

    def cut(self) -> None:
        """Shut them down: a collective in progress raises, on this rank and on its peers."""
        for one in self._sockets:
            with contextlib.suppress(OSError):  # the peer has closed it already
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets = []


def _connections() -> dict[int, socket.socket]:
    """Return this process's TCP connections by a name that both ends compute alike, as duplicated descriptors, which no later
    file can reuse."""
    found: dict[int, socket.socket] = {}
    for name in os.listdir(_OPEN_FILES) if os.path.isdir(_OPEN_FILES) else ():
        with contextlib.suppress(OSError):  # not a socket, or not connected
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
            try:
                ends = sorted([one.getsockname()[:2], one.getpeername()[:2]])
                is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                key = int.from_bytes(hashlib.blake2b(repr(ends).encode(), digest_size=8).digest(), "little")
            except OSError:
                one.close()
                raise
            if is_tcp and key not in found:
                found[key] = one
            else:
                one.close()
    return found
