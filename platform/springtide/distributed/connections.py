"""The TCP connections between the ranks of a group. They are cut when the group has lost a rank, so that no rank hangs.

gloo closes its connections only when the process ends. Suppose that one rank has noticed the loss of a peer and left the
collective. The remaining ranks still wait for this rank as long as its process lives. When this rank cuts its connections,
every waiting rank fails at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import stat

import numpy as np
import torch
import torch.distributed as dist

_OPEN_FILES = "/proc/self/fd"


class Connections:
    """This rank's connections to the other ranks. All ranks must create this object together: it calls collectives."""

    def __init__(self) -> None:
        mine = _connections()
        others_have = _shared(np.array(list(mine), dtype=np.uint64))
        self._sockets = []
        for name, one in mine.items():
            if name in others_have:
                self._sockets.append(one)
            else:  # close connections whose other end is no rank, such as connections to Ray
                one.close()

    def __len__(self) -> int:
        return len(self._sockets)

    def wait_until_lost(self) -> None:
        """Wait until a peer has closed its end of a connection, for example because its process has ended. Waits forever if
        there are no peers."""
        poller = select.poll()
        for one in self._sockets:
            poller.register(one, select.POLLRDHUP)
        poller.poll()

    def cut(self) -> None:
        """Shut down all connections. A collective in progress raises on this rank and on its peers."""
        for one in self._sockets:
            with contextlib.suppress(OSError):  # the peer may have closed the connection already
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets = []


def _shared(names: np.ndarray) -> set[int]:
    """Return those of this rank's connection ``names``, uint64 (n,), that another rank has, too; all ranks call it together.
    A name is the hash of a TCP connection's two addresses.

    Each name is sent to one rank that compares it (``by_owner``). So each rank exchanges only as many names as it has
    connections, which grows with the number of ranks. An all-gather of all names would grow with the square of the number."""
    if not dist.is_initialized():
        return set()
    size = dist.get_world_size()
    sorted_names, sent = by_owner(names, size)
    received = _exchange(sent, np.ones_like(sent), np.ones_like(sent))
    theirs = _exchange(sorted_names.view(np.int64), sent, received).view(np.uint64)
    answers = _exchange(is_shared(theirs).astype(np.int64), received, sent)
    return set(sorted_names[answers == 1].tolist())


def by_owner(names: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort ``names`` (hashes of TCP connections), uint64 (n,), by owner: the rank that compares a name, from 0 to ``size`` - 1.
    Returns the sorted names and the number of names of each owner."""
    comparer = (names % np.uint64(size)).astype(np.int64)
    return names[np.argsort(comparer, kind="stable")], np.bincount(comparer, minlength=size)


def is_shared(names: np.ndarray) -> np.ndarray:
    """Return a mask of the received ``names`` (hashes of TCP connections), bool (n,): True if the name was received more than
    once. Then both ends of the connection are ranks."""
    _, place, count = np.unique(names, return_inverse=True, return_counts=True)
    twice: np.ndarray = (count > 1)[place]
    return twice


def _exchange(values: np.ndarray, sent: np.ndarray, received: np.ndarray) -> np.ndarray:
    """Send consecutive parts of ``values``, int64 (n,), to the ranks: ``sent`` has the length of each rank's part. Return the
    parts that this rank receives, concatenated; ``received`` has the length from each rank."""
    found = torch.empty(int(received.sum()), dtype=torch.int64)
    dist.all_to_all_single(found, torch.from_numpy(values.copy()), received.tolist(), sent.tolist())
    return found.numpy()


def _connections() -> dict[int, socket.socket]:
    """Return this process's TCP connections: name -> socket. Both ends of a connection compute the same name, a hash of both
    addresses. Each socket has a duplicate of the file descriptor: so if gloo closes its descriptor, the number of the duplicate
    stays in use and cannot refer to another file."""
    found: dict[int, socket.socket] = {}
    for name in os.listdir(_OPEN_FILES) if os.path.isdir(_OPEN_FILES) else ():
        with contextlib.suppress(OSError):  # not a socket, or a socket without a connection
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
