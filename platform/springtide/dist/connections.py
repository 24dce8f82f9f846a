"""The connections between the ranks of a group, to cut them when the group is over.

gloo closes its connections only with the process: a rank that has heard of a lost peer keeps them open, and the ranks beyond it
wait in their collective for as long as it lives. Cut, every rank that waits fails at once, whoever was lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
from collections import Counter

import numpy as np
import torch.distributed as dist

_OPEN_FILES = "/proc/self/fd"


class Connections:
    """This rank's connections to the others. All ranks make theirs together."""

    def __init__(self) -> None:
        mine = _connections()
        everyone: list[np.ndarray] = [np.empty(0)] * dist.get_world_size()
        dist.all_gather_object(everyone, np.array(list(mine), dtype=np.uint64))
        ranks_that_have = Counter(np.concatenate(everyone).tolist())
        self._sockets = []
        for name, one in mine.items():
            if ranks_that_have[name] > 1:
                self._sockets.append(one)
            else:  # with Ray, or a store
                one.close()

    def __len__(self) -> int:
        return len(self._sockets)

    def cut(self) -> None:
        """End them: a collective that is under way raises, here and at the other ends."""
        for one in self._sockets:
            with contextlib.suppress(OSError):  # the other end was quicker
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets = []


def _connections() -> dict[int, socket.socket]:
    """The TCP connections of this process by the name that both ends would give them, as descriptors of our own, which no later
    file can take the place of."""
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
