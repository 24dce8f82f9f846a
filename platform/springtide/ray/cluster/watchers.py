"""One small actor per node that polls for the node's preemption notice and announces it to Ray as a drain with its deadline.

    metadata service or file --every 0.5 s--> PreemptionWatcher --drain_node(deadline)--> Ray --> the policies of every run
                                                     +--time left--> its run's mailbox: the clocks of nodes and driver differ

A metadata service that is slow, gone or sends nonsense is polled again; its last notice stays valid until it sends a new one. A
notice that Ray did not accept, because its control store is down, is announced again at the next poll. Only the run that
started a watcher ends it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.preemption import open_sources, poll
from springtide.preemption.notices import Notice, TimeLeft
from springtide.ray.cluster.nodes import drain
from springtide.ray.names import name_of

_log = logging.getLogger(__name__)

Tell = Callable[[str, TimeLeft], None]
"""Function that reports a node and the time left to it; it does not raise."""
_ASK_WATCHES_S = 10.0
"""Time between two checks that the watchers' sources of notices (metadata service, file) still answer [s]."""


class Relay:
    """Announces to Ray when the node will be taken away: at the first notice, and again only if a later notice names an earlier
    time. Thread-safe."""

    def __init__(self, drain: Callable[[float, str], None]) -> None:
        """``drain(at_s, why)`` announces to Ray that the node leaves at ``at_s``, in seconds since 1970. If it raises, Ray was
        not informed, and the next notice is announced in its place."""
        self._drain = drain
        self._announced: Notice | None = None
        self._lock = threading.Lock()

    def __call__(self, notice: Notice) -> None:
        """Announce ``notice``, unless the same time or an earlier one was announced."""
        with self._lock:
            # a metadata service without a deadline returns a later time at each poll: the first time counts
            if self._announced is not None and notice.at_s >= self._announced.at_s:
                return
            self._drain(max(notice.at_s, time.time() + 1.0), notice.why)
            self._announced = notice


class PreemptionWatcher:
    """Polls one node's sources of notices; one actor per node and run. Ends with the run's controller."""

    def __init__(self, cloud: str, metadata_url: str, file: str, rebalance: bool, tell: Tell) -> None:
        """``cloud``: name of the cloud; ``auto`` detects it. ``file``: a path, as ``elastic.notice_file``. ``tell`` reports the
        time left to the node to the run's driver."""
        context = ray.get_runtime_context()
        node, gcs = context.get_node_id(), context.gcs_address

        def announce(at_s: float, why: str) -> None:
            deadline_ms = int(at_s * 1000)
            tell(node, TimeLeft(deadline_ms, at_s - time.time()))  # before the drain, which makes the driver read it
            drain(gcs, node, deadline_ms, why)

        relay = Relay(announce)
        self._sources = open_sources(cloud, metadata_url, file, rebalance, node, relay)
        poll(self._sources)

    def sources(self) -> list[str]:
        """Return the names of the polled sources."""
        return [source.name for source in self._sources]

    def silent(self) -> str:
        """Return which sources have not answered for a while, and why; empty if all answer."""
        if not self._sources:
            return "no source is polled (elastic.notices, elastic.notice_file)"
        return "; ".join(source.problem for source in self._sources if source.problem)


class PreemptionWatchers:
    """A run's watchers: one on each node."""

    def __init__(
        self, cloud: str, metadata_url: str, file: str, rebalance: bool, tell: Tell, owner: str = "springtide"
    ) -> None:
        """Arguments as for ``PreemptionWatcher``; ``owner`` is the run's id."""
        self._owner = owner
        self._arguments = (cloud, metadata_url, file, rebalance, tell)
        self._actors: dict[str, ActorHandle[PreemptionWatcher]] = {}
        self._asked: dict[str, ObjectRef[str]] = {}
        """Node -> reference to its watcher's pending answer: which sources of notices do not answer."""
        self._silent: dict[str, str] = {}
        """Node -> why its sources of notices do not answer, as last reported; empty if all answer."""
        self._ask_at_s = 0.0

    def cover(self, nodes: set[str]) -> None:
        """Run a watcher on each of ``nodes``, and log a warning for nodes with a source of notices that does not answer. Does
        not wait."""
        for node in nodes - self._actors.keys():
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            actor = ray.remote(PreemptionWatcher).options(
                name=name_of(self._owner, "notices"), num_cpus=0, max_restarts=-1, scheduling_strategy=here
            )
            self._actors[node] = actor.remote(*self._arguments)
        for node in self._actors.keys() - nodes:
            del self._actors[node]
        self._check_sources(nodes)

    def end(self) -> None:
        """End all watchers. Without this call, a driver that goes on would keep them until Python's garbage collector finds the
        run's objects."""
        for actor in self._actors.values():
            with contextlib.suppress(RayError):
                ray.kill(actor)
        self._actors, self._asked = {}, {}

    def _check_sources(self, nodes: set[str]) -> None:
        now = time.monotonic()
        if now >= self._ask_at_s:  # a watcher with a pending answer is not asked again
            self._asked = {node: actor.silent.remote() for node, actor in self._actors.items()} | self._asked
            self._ask_at_s = now + _ASK_WATCHES_S
        self._asked = {node: answer for node, answer in self._asked.items() if node in nodes}
        if not self._asked:
            return
        done, _ = ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
        for node, answer in [one for one in self._asked.items() if one[1] in done]:
            del self._asked[node]
            with contextlib.suppress(RayError):  # the watcher is lost or restarts: query it later
                self._report(node, ray.get(answer))

    def _report(self, node: str, problem: str) -> None:
        if problem and not self._silent.get(node):
            _log.warning("node %s may be taken away without a notice: %s", node[:8], problem)
        elif self._silent.get(node) and not problem:
            _log.warning("node %s receives notices again", node[:8])
        self._silent[node] = problem
