"""Find a run's snapshot servers, and the snapshot parts that they hold (a part is one rank's share of a snapshot)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import ray
from ray.actor import ActorHandle

from springtide.checkpoint.snapshot_parts import SnapshotPart, newest_whole
from springtide.ray.cluster.liveness import Liveness
from springtide.ray.cluster.nodes import refusing, standing
from springtide.ray.cluster.session import NAMESPACE
from springtide.storage import Folder, digest

ANSWER_S = 3.0
"""A server that has not answered within this time is lost, or busy [s]."""
BUSY_S = 30.0
"""How long to wait for the answer of a server whose node is up [s]."""
_PROMPT_S = 0.2
"""Servers that are up answer within this time [s]."""
_AT_ONCE_S = 0.05
"""The node of a server that has not answered within this time is probed, because the server may be lost [s]."""


def name_prefix(run: Folder) -> str:
    """Return the prefix of the names of a run's servers."""
    return f"{run.name}/snapshots/{digest.of_bytes(run.url.encode())[:12]}-"


def servers_named(name: str) -> Iterator[ActorHandle]:
    """Yield handles of the servers that have names with the prefix ``name``."""
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE and one["name"].startswith(name):
            with contextlib.suppress(ValueError):  # the server has ended meanwhile
                yield ray.get_actor(one["name"], namespace=NAMESPACE)


class ServerContents(NamedTuple):
    """The snapshot parts that a server holds."""

    where: tuple[str, int]
    """The server's node and process."""
    held: list[tuple[SnapshotPart, int]]
    """Each part, with the file descriptor of its memory in the server's process."""
    server: ActorHandle


def contents_of(asked: Iterable[ActorHandle]) -> list[ServerContents]:
    """Return the snapshot parts that each of these servers holds. Servers that are up answer at once. Other servers (lost, busy
    or starting) are waited for only while parts of the newest known snapshot are missing. After ``ANSWER_S``, only servers
    whose node is up and whose process is not gone are waited for, up to ``BUSY_S``."""
    waiting = {server.found.remote(): server for server in asked}
    known: list[ServerContents] = []
    begin_s, liveness = time.monotonic(), Liveness()
    _take(waiting, known, len(waiting), _AT_ONCE_S)
    _drop_lost(waiting)
    end_s, number, wait_s = begin_s + ANSWER_S, len(waiting), _PROMPT_S - _AT_ONCE_S
    while waiting and wait_s > 0:
        _take(waiting, known, number, wait_s)
        if is_newest_whole(known):
            break
        number, wait_s = 1, end_s - time.monotonic()
        if wait_s <= 0 and end_s == begin_s + ANSWER_S:
            up = standing(waiting.values())
            waiting = {answer: server for answer, server in waiting.items() if server in up}
            end_s = begin_s + BUSY_S
            wait_s = end_s - time.monotonic()
        if end_s == begin_s + BUSY_S:
            gone = liveness.gone(dict.fromkeys(waiting.values(), ""))
            waiting = {answer: server for answer, server in waiting.items() if server not in gone}
            wait_s = min(wait_s, ANSWER_S)
    return known


def num_unheard(servers: Sequence[ActorHandle], known: Sequence[ServerContents]) -> int:
    """Return how many of ``servers`` did not answer and may hold missing parts of a newer snapshot. Returns 0 if ``known`` has
    all parts of the newest snapshot."""
    return 0 if is_newest_whole(known) else len(servers) - len(known)


def is_newest_whole(known: Sequence[ServerContents]) -> bool:
    """Return True if ``known`` has all parts of the newest snapshot in it. Otherwise a server that is not in ``known`` may hold
    the missing parts."""
    parts = [part for one in known for part, _ in one.held]
    whole = newest_whole(parts)
    return bool(whole) and _age(whole[0]) == max(map(_age, parts))


def _take(waiting: dict[ray.ObjectRef, ActorHandle], known: list[ServerContents], number: int, wait_s: float) -> None:
    """Wait until ``number`` servers have answered, or ``wait_s`` is over. Moves their answers from ``waiting`` to ``known``."""
    for answer in ray.wait(list(waiting), num_returns=number, timeout=wait_s)[0] if waiting else ():
        server = waiting.pop(answer)
        with contextlib.suppress(ray.exceptions.RayError):  # the server is gone with its node
            where, held = ray.get(answer)
            known.append(ServerContents(where, held, server))


def _drop_lost(waiting: dict[ray.ObjectRef, ActorHandle]) -> None:
    """Remove the servers on nodes that refuse a connection from ``waiting``: no answer comes from there, and Ray notices the
    loss seconds later."""
    if waiting:
        with contextlib.suppress(ray.exceptions.RayError, OSError):  # if the probe fails, all servers are waited for
            gone = refusing(waiting.values(), _AT_ONCE_S)
            for answer in [answer for answer, server in waiting.items() if server in gone]:
                del waiting[answer]


def _age(part: SnapshotPart) -> tuple[int, int]:
    return part.meta.step, part.term
