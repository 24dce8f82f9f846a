"""Distinguish a busy process from a process that is gone: stopped (SIGSTOP), or on a host that is paused or cut off.

Each Ray process is probed at its gRPC port. The threads behind the port answer in every phase: while the process imports, joins
a process group, restores, compiles, or is in a call that holds Python's lock (the GIL). An actor that has not started yet has
no port, so the raylet (Ray's process on each node) of its node is probed instead.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError

from springtide.ray.cluster.nodes import mute, processes_of, raylets_of

GONE_S = 9.0
"""A process that has answered no probe for this long is gone [s]."""
QUIET_S = 4.0
"""If a process has not replied to a call for this long, it is probed [s]."""
_APART_S = 3.0
"""Least time between two rounds of probes [s]."""
_ANSWER_S = 1.0
"""How long a process may take to answer a probe [s]."""


class Liveness:
    """Probes processes whose reply is awaited, and remembers since when each of them has answered no probe."""

    def __init__(self) -> None:
        self._looked_s = float("-inf")
        self._mute_since_s: dict[ActorHandle, float] = {}

    def gone(self, waited_for: Mapping[ActorHandle, str]) -> set[ActorHandle]:
        """Return the actors whose processes are gone: they have answered no probe for ``GONE_S``. Takes about a second at most.
        The processes are probed again only if the last round of probes is ``_APART_S`` old.

        Args:
            waited_for: actors, each with its node.
        """
        now = time.monotonic()
        if now - self._looked_s >= _APART_S:
            with contextlib.suppress(RayError, OSError):  # if a probe is impossible, no process counts as gone
                before, self._mute_since_s = self._mute_since_s, {}
                self._mute_since_s = {one: before.get(one, now) for one in silent_processes(waited_for)}
            self._looked_s = time.monotonic()
        return {one for one, since_s in self._mute_since_s.items() if one in waited_for and now - since_s >= GONE_S}


def silent_processes(actors: Mapping[ActorHandle, str]) -> set[ActorHandle]:
    """Return those of ``actors`` (actor -> its node) whose process does not answer a probe now. For an actor that has not
    started yet, the raylet (Ray's process on the node) is probed. An actor that has ended counts as answering, because Ray
    reports its end. Raises RayError or OSError if a probe is impossible."""
    if not actors:
        return set()
    known = processes_of(actors)
    starting = {node for actor, node in actors.items() if actor not in known}
    silent = mute(known, _ANSWER_S)
    stopped = mute(raylets_of(starting), _ANSWER_S) if starting else set()
    return silent | {actor for actor, node in actors.items() if actor not in known and node in stopped}


def answers(asked: Mapping[ObjectRef, tuple[ActorHandle, str]], timeout_s: float) -> set[ObjectRef]:
    """Wait for the answers to calls, and return those that have arrived. The wait ends early if all missing answers are owed by
    processes that are gone.

    Args:
        asked: reference to an answer -> the actor that owes the answer, and the actor's node.
        timeout_s: how long to wait [s].
    """
    liveness, end_s = Liveness(), time.monotonic() + timeout_s
    waiting, done, quiet_s = list(asked), set[ObjectRef](), min(timeout_s, QUIET_S)
    while waiting:
        newly, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=quiet_s)
        done |= set(newly)
        left_s = end_s - time.monotonic()
        gone: Collection[ActorHandle] = liveness.gone(dict(asked[ref] for ref in waiting)) if left_s > 0 else ()
        if left_s <= 0 or all(asked[ref][0] in gone for ref in waiting):
            break
        quiet_s = min(left_s, _APART_S)
    return done
