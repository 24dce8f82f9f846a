"""One run on a simulated cluster. A test makes nodes join and leave, lets time pass, and reads the run's requests and events.

The policies, the mailbox, the pool of worker processes and the snapshot saver are real. Delays come from the seed.

    with scenario(nodes=2, min_workers=1, max_workers=2) as run:
        run.train()
        run.cluster.notice("node02", 60.0)
        run.wait(30.0)
        assert run.asked == [GroupRequest.COPY, GroupRequest.LEAVE]
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from unittest import mock

import torch
from ray.train.v2.api.exceptions import WorkerGroupError

from simulation import outside
from simulation import store as stores
from simulation.check import Watch
from simulation.clock import Clock
from simulation.cluster import Cluster
from simulation.driver import Controller, MailboxClient, Reference, Simulated
from simulation.group import Setting
from simulation.play import prepared
from springtide.checkpoint import leases
from springtide.elastic import GroupRequest
from springtide.elastic.allocation import WorkerShare
from springtide.events import Decided
from springtide.ray.cluster import nodes as cluster_nodes
from springtide.ray.train import scaling_policy as policies
from springtide.ray.train.mailbox import Mailbox
from springtide.storage import Folder

T = TypeVar("T")
_TURN_S = 1.0
_LONGEST_S = 3600.0


class Scenario:
    """A run, its controller and its cluster. ``node01`` is the first node."""

    def __init__(self, seed: int, nodes: int, changes: Mapping[str, Any], shares: bool) -> None:
        self.clock = Clock(seed)
        self.store = stores.Store(self.clock)
        self.cluster = Cluster(self.clock, nodes)
        config, data, digests = prepared()
        self.config = config.override({"run.id": "run", **{f"elastic.{key}": value for key, value in changes.items()}})
        run = Folder(self.config.run.root) / "run"
        watch = Watch(self.clock, self.store, self.cluster, run, digests)
        self.setting = Setting(self.clock, self.cluster, self.config, run, data, digests, step_s=1.0)
        self.simulated = Simulated(self.clock, self.cluster, self.setting, watch)
        self.queue = Queue(self.cluster) if shares else None
        self.events: list[Any] = []
        """All events of the run."""
        self.started_s: list[float] = []
        """When the controller began to start each group [s]."""
        self.probed: list[set[str]] = []
        """Nodes of each request for an answer."""
        self._work: Callable[[], Any] | None = None

    def open(self) -> None:
        """Claim the run and start the controller's process."""
        leases.claim(self.setting.run, "owner", trains=False)
        mailbox = Mailbox("run", self.config.num_steps, float(self.config.elastic.hang))
        self.mailbox = RecordingMailbox(self.clock, mailbox, "run", self.events)
        self.controller = Controller(self.simulated, self.config, "owner", self.mailbox, self.queue)
        self.controller.begins = lambda: self.started_s.append(self.clock.now)
        self.policy, self.pool = self.controller.policy, self.controller.pool
        self._process = self.clock.start("controller", "hub", self._serve)

    @property
    def asked(self) -> list[GroupRequest]:
        """All requests to the groups."""
        return self.mailbox.asked

    @property
    def group(self) -> tuple[str, ...]:
        """Nodes of the group that trains; empty if none does."""
        return self.controller.group.nodes if self.controller.group else ()

    @property
    def reasons(self) -> list[str]:
        """Reasons of all decisions."""
        return [one.reason for one in self.events if isinstance(one, Decided)]

    def turn(self) -> None:
        """Have the policy decide once, and carry that out. Raises what ends the run."""
        self._call(self._turn)

    def wait(self, seconds: float) -> None:
        """Let time pass, with a turn each second while a group trains."""
        self._call(functools.partial(self._until, lambda: False, seconds))

    def until(self, done: Callable[[], bool], within_s: float = _LONGEST_S) -> None:
        """Let time pass until ``done``."""
        self._call(functools.partial(self._until, done, within_s))
        assert done(), f"not within {within_s} s"

    def train(self, steps: int = 1) -> None:
        """Let time pass until a group has trained some steps."""
        newest = self.simulated.watch.newest + steps
        self.until(lambda: bool(self.group) and self.simulated.watch.newest >= newest)

    def stop(self) -> None:
        """Ask the run to stop, as a user does."""
        self.mailbox.mailbox._run.asked = GroupRequest.STOP

    def _turn(self) -> None:
        try:
            self.controller.follow(self.controller.decide())
        except WorkerGroupError as error:
            self.controller.fail(error)

    def _until(self, done: Callable[[], bool], within_s: float) -> None:
        end_s = self.clock.now + within_s
        while not done() and self.clock.now < end_s:
            self._turn()
            if self.group:  # else Ray asks again at once
                self.clock.sleep(min(_TURN_S, max(0.0, end_s - self.clock.now)))

    def _serve(self) -> None:
        while True:
            while self._work is None:
                self.clock.park()
            try:
                self._work()
            except Exception as error:  # the test looks
                self._error = error
            self._work = None

    def _call(self, work: Callable[[], Any]) -> None:
        """Have the controller's process carry out ``work``."""
        self._work, self._error = work, None
        self.clock.after(0.0, self._process.step)
        self.clock.run(math.inf, lambda: self._work is None)
        assert self._work is None, "the controller waits for ever"
        if self._error is not None:
            raise self._error


class RecordingMailbox(MailboxClient):
    """A client that keeps all events and requests of its run, and may be slow."""

    def __init__(self, clock: Clock, mailbox: Mailbox, key: str, events: list[Any]) -> None:
        super().__init__(clock, mailbox, key)
        self.asked: list[GroupRequest] = []
        self.left_s: list[float] = []
        """How long a copy in memory may take, by request [s]."""
        self.is_slow = False
        mailbox._run.events = events

    def ask(self, interrupt: GroupRequest, left_s: float = math.inf) -> Reference:
        self.asked.append(interrupt)
        self.left_s.append(left_s)
        return self._call("ask", interrupt, left_s)

    def progress(self) -> Reference:
        return Reference(self.clock, math.inf) if self.is_slow else self._call("progress")


class Queue:
    """The cluster's queue, which gives a run its places."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.taken: set[str] = set()
        """Nodes of other runs."""
        self.others = ""
        self.held: dict[str, int] = {}
        """Node -> workers that the run says it has."""

    def mine(self, timeout_s: float, holds: Mapping[str, int], most: int) -> WorkerShare:
        self.held = dict(holds)
        free = [one.id for one in self._cluster.alive if one.id not in self.taken]
        return WorkerShare({name: {"CPU": 1.0} for name in free}, self.others)


@contextlib.contextmanager
def scenario(nodes: int, shares: bool = False, seed: int = 0, **elastic: Any) -> Iterator[Scenario]:
    """A run on so many nodes. ``shares``: a queue gives it its places; ``elastic``: settings of that section."""
    leaks: list[str] = []
    run = Scenario(seed, nodes, elastic, shares)

    def unanswering(names: set[str], speaks: bool) -> set[str]:
        run.probed.append(set(names))
        return run.cluster.unspeaking(names, speaks)

    with (
        torch.enable_grad(),  # a rank that is killed in no_grad would leave it to the tests that follow
        stores.installed(run.store),
        outside.replaced(run.clock, seed),
        outside.guarded(leaks.append),
        run.simulated.patched(),
        mock.patch.object(policies, "observed", cluster_nodes.observed),
        mock.patch.object(cluster_nodes.state, "get_draining_nodes", run.cluster.draining),
        mock.patch.object(policies, "unanswering", unanswering),
    ):
        run.open()
        try:
            yield run
        finally:
            run.clock.end()
    assert not leaks
