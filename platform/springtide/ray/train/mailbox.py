"""The mailbox between a run's workers and its driver: events go to the driver, requests go to the workers.

Rank 0 posts events, and the driver takes them. So workers need no access to the tracking store or the console.

    worker, controller --MailboxClient--> Mailbox (an actor on the driver's node) <--MailboxClient-- driver
                       <--requests: rank 0 has a pending call, which returns as soon as a request is made

A driver that trains several runs in turn keeps its mailbox, because a process takes a second to start. Every call carries the
key of its run, so that a late call for an ended run is dropped. Rank 0 uses the mailbox through ``EventSender``, at the end of
this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets
import time
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.elastic import GroupRequest
from springtide.elastic.forecast import RestartForecast, RunHistory
from springtide.events import Event, Left, StepDone, record
from springtide.preemption.notices import TimeLeft

_BLOCK_BYTES = 8 * 2**20
_ANSWER_S = 2.0
_LEAVING = (GroupRequest.LEAVE, GroupRequest.EVACUATE)
T = TypeVar("T")


class WorkerLimit(NamedTuple):
    """The limit on the run's workers, as set by commands to the run (``run.control``)."""

    workers: int = 0
    """Most workers; 0: as many as the config allows."""
    paused_by: str = ""
    """Who paused the run; empty if it is not paused."""
    serial: int = 0
    """Rises whenever the limit is set, so that an equal limit that is set again counts as a change, and is reported again."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What Ray Train's controller needs to know about training."""

    step: int = 0
    left: bool = False
    """Whether the worker group has saved its state and waits to be replaced by a new group."""
    stop: bool = False
    """Whether the run was asked to stop."""
    silent_s: float = 0.0
    """Time since the group's last event or heartbeat [s]."""
    longest_s: float = math.inf
    """How long the group may be silent before it counts as hung [s]."""
    prospects: RestartForecast = dataclasses.field(default_factory=RestartForecast)
    limit: WorkerLimit = dataclasses.field(default_factory=WorkerLimit)


class _RunState:
    """The mailbox's state for one run."""

    def __init__(self, key: str, num_steps: int, hang_s: float) -> None:
        self.key, self.hang_s = key, hang_s
        self.events: list[Event] = []
        self.arrived = asyncio.Event()
        self.asked: GroupRequest | None = None
        self.copy = False  # whether a COPY request is open: copy snapshots from leaving nodes to others
        self.groups = 0
        """Number of worker groups started so far."""
        self._changed = asyncio.Event()
        self.leave_by_s = math.inf
        """The moment at which a group that leaves must have a safe copy of its state in memory, by ``time.monotonic`` [s]."""
        self.left = False
        self.last_event_s = math.inf
        self.history = RunHistory(num_steps)
        self.micro_batch: int | None = None
        self.limit = WorkerLimit()
        self.notices: dict[str, tuple[int, float]] = {}
        """Leaving node -> its deadline as announced to Ray [ms since 1970], and the same moment by ``time.monotonic`` [s]."""

    @property
    def request(self) -> GroupRequest | None:
        """The open request to the workers: ``asked`` if it is set; else COPY if a COPY request is open; else None."""
        return self.asked or (GroupRequest.COPY if self.copy else None)

    def changed(self) -> None:
        """Wake the callers that wait in ``change``, because the request, the group or the run has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait until ``changed()`` is called."""
        await self._changed.wait()


class Mailbox:
    """The mailbox actor. There is one per driver, on the driver's node. It serves one run at a time, and ends with the driver.

    A call with the key of a run that is over does nothing and returns None.
    """

    def __init__(self, key: str, num_steps: int, hang_s: float) -> None:
        """Open the mailbox of the first run."""
        self._run = _RunState(key, num_steps, hang_s)

    async def open(self, key: str, num_steps: int, hang_s: float) -> None:
        """Open the mailbox of the next run; the previous run is over."""
        before, self._run = self._run, _RunState(key, num_steps, hang_s)
        before.changed()

    async def post(self, key: str, events: Sequence[Event]) -> None:
        """Store events for the driver, as ``MailboxClient.post`` describes."""
        run = self._run
        if key != run.key:
            return
        for one in events:
            run.left |= isinstance(one, Left)
            if not one.from_controller:
                run.last_event_s = time.monotonic()
            run.history.add(record(one))
        run.events += events
        run.arrived.set()

    async def request(
        self, key: str, known: GroupRequest | None, followed: GroupRequest | None = None
    ) -> GroupRequest | None:
        """Return the open request to the workers once it changes, as ``MailboxClient.request`` describes."""
        if followed is not None:
            await self.cancel(key, followed)
        run = self._run
        group = run.groups
        while self._run is run and run.key == key and run.groups == group and run.request is known:
            await run.change()
        return run.request if self._run is run and run.key == key else None

    async def take(self, key: str, wait_s: float) -> list[Event] | None:
        """Return the events posted since the last call, as ``MailboxClient.take`` describes."""
        run = self._run
        if key != run.key:
            return None
        if not run.events:
            run.arrived.clear()
            try:
                await asyncio.wait_for(run.arrived.wait(), wait_s)
            except TimeoutError:
                return []
        taken, run.events = run.events, []
        return taken

    async def ask(self, key: str, request: GroupRequest, left_s: float = math.inf) -> None:
        """Set the request to the workers, as ``MailboxClient.ask`` describes."""
        run = self._run
        if request is GroupRequest.COPY:
            run.copy |= key == run.key
            run.changed()
            return
        weaker = run.asked is GroupRequest.STOP and request is not GroupRequest.STOP
        weaker |= run.asked in _LEAVING and request is GroupRequest.SAVE  # leaving keeps the state anyway
        if key == run.key and not weaker:
            run.asked, run.leave_by_s = request, time.monotonic() + left_s
            run.changed()

    async def time_to_leave_s(self, key: str) -> float | None:
        """Return the time until a leaving group must have a safe copy of its state, as ``MailboxClient.time_to_leave_s``
        describes."""
        run = self._run
        return run.leave_by_s - time.monotonic() if key == run.key else None

    async def cancel(self, key: str, request: GroupRequest) -> None:
        """Withdraw ``request`` to the workers if it is still open."""
        run = self._run
        if key == run.key:
            run.copy &= request is not GroupRequest.COPY
            run.asked = None if run.asked is request else run.asked
            run.changed()

    async def heartbeat(self, key: str) -> None:
        """Record that the group is alive, as ``MailboxClient.heartbeat`` describes."""
        if key == self._run.key:
            self._run.last_event_s = time.monotonic()

    async def reset_for_new_group(self, key: str) -> None:
        """Reset the mailbox for a new worker group, as ``MailboxClient.reset_for_new_group`` describes."""
        run = self._run
        if key == run.key:
            run.left, run.last_event_s = False, time.monotonic()
            run.history.restart()
            run.asked, run.leave_by_s = None if run.asked in _LEAVING else run.asked, math.inf
            run.copy = False
            run.groups += 1
            run.changed()

    async def group_runs(self, key: str, workers: int) -> None:
        """Record that the group's processes run, as ``MailboxClient.group_runs`` describes."""
        run, now = self._run, time.monotonic()
        if key == run.key and run.history.runs(workers, now):
            run.last_event_s = now

    async def group_formed(self, key: str) -> None:
        """Record that all ranks of the group are connected, as ``MailboxClient.group_formed`` describes."""
        run, now = self._run, time.monotonic()
        if key == run.key:
            run.history.formed(now)
            run.last_event_s = now

    async def notice(self, key: str, node: str, left: TimeLeft) -> None:
        """Record the time left to a leaving node, as ``NoticeSender`` describes."""
        run, ends_s = self._run, time.monotonic() + left.left_s
        if key == run.key and ends_s < run.notices.get(node, (0, math.inf))[1]:
            run.notices[node] = (left.deadline_ms, ends_s)

    async def notices(self, key: str) -> dict[str, TimeLeft] | None:
        """Return the time left to each leaving node, as ``MailboxClient.notices`` describes."""
        run, now = self._run, time.monotonic()
        if key != run.key:
            return None
        return {node: TimeLeft(deadline_ms, ends_s - now) for node, (deadline_ms, ends_s) in run.notices.items()}

    async def progress(self, key: str) -> Progress | None:
        """Return the run's progress, as ``MailboxClient.progress`` describes."""
        run = self._run
        if key != run.key:
            return None
        longest_s = run.history.longest_s(run.hang_s) if run.hang_s else math.inf
        silent_s = max(0.0, time.monotonic() - run.last_event_s)
        stop = run.asked is GroupRequest.STOP
        return Progress(run.history.step, run.left, stop, silent_s, longest_s, run.history.prospects(), run.limit)

    async def limit_workers(self, key: str, limit: WorkerLimit) -> None:
        """Set the most workers, as ``MailboxClient.limit_workers`` describes."""
        if key == self._run.key:
            self._run.limit = limit

    async def limit_micro_batch(self, key: str, rows: int) -> None:
        """Set the largest micro-batch, as ``MailboxClient.limit_micro_batch`` describes."""
        if key == self._run.key:
            self._run.micro_batch = rows

    async def largest_micro_batch(self, key: str) -> int | None:
        """Return the largest micro-batch, as ``MailboxClient.largest_micro_batch`` describes."""
        return self._run.micro_batch if key == self._run.key else None

    async def node(self) -> str:
        """Return the driver's node."""
        return str(ray.get_runtime_context().get_node_id())

    async def block(self) -> np.ndarray:
        """Return 8 MiB of data; a caller fetches them to measure the speed of the network."""
        return np.ones(_BLOCK_BYTES, np.uint8)


@dataclasses.dataclass(frozen=True)
class Reply(Generic[T]):
    """The mailbox's reply to a call. If a later call must take effect after this call, wait for this reply first: Ray runs the
    calls of an asyncio actor in any order. If the mailbox is gone, a call has no effect."""

    ref: ObjectRef[T]

    def get(self, timeout_s: float | None = None) -> T:
        """Wait for the reply. Raises RayError if the mailbox is gone or does not reply in time."""
        value: T = ray.get(self.ref, timeout=timeout_s)
        return value

    def wait(self, timeout_s: float = _ANSWER_S) -> None:
        """Wait until the call has taken effect. Gives up without an error if the mailbox is gone or too slow."""
        with contextlib.suppress(RayError):
            self.get(timeout_s)

    def has_come(self, timeout_s: float | None) -> bool:
        """Return True if the reply, or an error, arrives within ``timeout_s``; None waits without a limit."""
        return bool(ray.wait([self.ref], timeout=timeout_s)[0])


@dataclasses.dataclass(frozen=True)
class MailboxClient:
    """A client of a run's mailbox, in any process. A reply is None if the run is over."""

    actor: ActorHandle[Mailbox]
    key: str
    name: str = ""
    """The actor's name; empty if it has none."""

    def post(self, events: Sequence[Event]) -> Reply[None]:
        """Post events to the driver."""
        return Reply(self.actor.post.remote(self.key, events))

    def request(self, known: GroupRequest | None, followed: GroupRequest | None = None) -> Reply[GroupRequest | None]:
        """Reply with a request that the workers have not carried out, once there is one that differs from ``known``, which the
        caller already has. Also reply when the group or the run is over.

        ``followed``: a request that the group has just carried out. It is withdrawn first, in the same call: a separate
        withdrawal might arrive too late, and the request would be delivered twice."""
        return Reply(self.actor.request.remote(self.key, known, followed))

    def take(self, wait_s: float) -> Reply[list[Event]]:
        """Reply with all events posted since the last call. If there is none, waits up to ``wait_s`` [s] for one; the list may
        stay empty. For the current run only."""
        return Reply(self.actor.take.remote(self.key, wait_s))

    def ask(self, request: GroupRequest, left_s: float = math.inf) -> Reply[None]:
        """Send a request to the workers, in place of the last one. STOP is never replaced; SAVE replaces neither LEAVE nor
        EVACUATE, the requests to end the group. COPY is stored separately, and delivered when no other request is open.
        ``left_s``: time until the group must have a safe copy of its state in memory [s]."""
        return Reply(self.actor.ask.remote(self.key, request, left_s))

    def time_to_leave_s(self) -> Reply[float | None]:
        """Reply with the time until a group that leaves must have a safe copy of its state in memory [s]."""
        return Reply(self.actor.time_to_leave_s.remote(self.key))

    def heartbeat(self) -> Reply[None]:
        """Report that the group is alive, though it has no event to post."""
        return Reply(self.actor.heartbeat.remote(self.key))

    def reset_for_new_group(self) -> Reply[None]:
        """Reset the mailbox for a new worker group: clear ``Progress.left`` of the old group, and withdraw open requests to
        leave or to copy snapshots."""
        return Reply(self.actor.reset_for_new_group.remote(self.key))

    def group_runs(self, workers: int) -> Reply[None]:
        """Report that the worker group's processes run. From now on the group counts as hung if it sends nothing for too
        long."""
        return Reply(self.actor.group_runs.remote(self.key, workers))

    def group_formed(self) -> Reply[None]:
        """Report that the worker group's first collective is done: all ranks are connected."""
        return Reply(self.actor.group_formed.remote(self.key))

    def notices(self) -> Reply[dict[str, TimeLeft] | None]:
        """Reply with the time left to each leaving node."""
        return Reply(self.actor.notices.remote(self.key))

    def progress(self) -> Reply[Progress | None]:
        """Reply with the run's progress, which Ray Train's controller polls."""
        return Reply(self.actor.progress.remote(self.key))

    def limit_workers(self, limit: WorkerLimit) -> Reply[None]:
        """Limit the workers of the current group and of later ones, and set whether the run is paused."""
        return Reply(self.actor.limit_workers.remote(self.key, limit))

    def limit_micro_batch(self, rows: int) -> Reply[None]:
        """Limit the micro-batches of later groups to this many rows, because more did not fit in memory."""
        return Reply(self.actor.limit_micro_batch.remote(self.key, rows))

    def largest_micro_batch(self) -> Reply[int | None]:
        """Reply with the largest micro-batch allowed; None if there is no limit [rows]."""
        return Reply(self.actor.largest_micro_batch.remote(self.key))

    def fetch_speed(self) -> float:
        """Measure the network speed from the driver's node to this one; 0 on the driver's node itself [bytes/s]."""
        if ray.get(self.actor.node.remote()) == ray.get_runtime_context().get_node_id():
            return 0.0
        begin = time.perf_counter()
        block = ray.get(self.actor.block.remote())
        assert block.all()
        return _BLOCK_BYTES / (time.perf_counter() - begin)


@dataclasses.dataclass(frozen=True)
class NoticeSender:
    """Sends preemption notices to the mailbox actor of this name. It looks the actor up by name, because Ray warns if the
    arguments of an actor that it may restart contain an actor handle."""

    name: str
    key: str

    def __call__(self, node: str, left: TimeLeft) -> None:
        """Report the time left to a leaving node. A report that gives the node more time than an earlier one is dropped. Waits
        two seconds at most for delivery."""
        with contextlib.suppress(RayError, ValueError):  # the mailbox is gone with its driver
            ray.get(ray.get_actor(self.name).notice.remote(self.key, node, left), timeout=_ANSWER_S)


def open_mailbox(
    name: str | None, num_steps: int = 0, hang_s: float = 0.0, before: MailboxClient | None = None
) -> MailboxClient:
    """Open the mailbox of a new run. It uses the actor of the previous run's mailbox ``before``; without one, a new actor on
    this node. ``name``: the new actor's name; raises ValueError if the cluster has an actor of that name."""
    key = secrets.token_hex(8)
    if before is not None:
        ray.get(before.actor.open.remote(key, num_steps, hang_s))
        return MailboxClient(before.actor, key, before.name)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Mailbox).options(name=name, num_cpus=0, scheduling_strategy=here)
    return MailboxClient(actor.remote(key, num_steps, hang_s), key, name or "")


# Rank 0's end of the mailbox: it sends the run's events, and receives the driver's requests to the workers.
#
# step k     forward, backward --rank 0 has a request?--> all-reduce sends it to all ranks --update--> it is carried out
# mailbox    a pending call of rank 0 returns when a request is made
#
# So a request that arrives before the all-reduce of a step is carried out after that step. A request that arrives later is
# carried out after the next step.

_BEAT_S = 1.0
_ONCE = (GroupRequest.COPY, GroupRequest.SAVE)
"""Requests after which a group keeps training; each is delivered once."""


class EventSender:
    """Rank 0's end of the mailbox. Never waits for the driver in a step: while a post is in flight, new events are collected
    for the next post."""

    def __init__(self, mailbox: MailboxClient) -> None:
        self._mailbox = mailbox
        self._waiting: list[Event] = []
        self._in_flight: Reply[None] | None = None
        self._asked: GroupRequest | None = None
        self._request = mailbox.request(None)
        self._beat_s = -math.inf

    def __call__(self, event: Event) -> None:
        """Send one event. A finished step is sent in the background. Any other event (a checkpoint, the end) is delivered
        before this returns."""
        self._waiting.append(event)
        if not isinstance(event, StepDone):
            self.flush()
        elif self._settle(0):
            self._post()

    def heartbeat(self) -> None:
        """Report that the group is alive, at most once a second. Does not wait."""
        if time.monotonic() - self._beat_s >= _BEAT_S:
            self._beat_s = time.monotonic()
            self._mailbox.heartbeat()

    def interrupt(self) -> GroupRequest | None:
        """Return the driver's request, if it has reached this process. A SAVE or COPY request is returned once, any other
        request at every call. Does not wait."""
        if not self._request.has_come(0):
            return self._asked
        asked = self._request.get()
        once = asked in _ONCE
        self._asked = None if once else asked
        self._request = self._mailbox.request(self._asked, asked if once else None)
        return asked

    def time_to_leave_s(self) -> float:
        """Return the time until this group, which was asked to leave, must have a safe copy of its state in memory [s].
        Infinite if the mailbox does not answer."""
        with contextlib.suppress(RayError):
            left_s = self._mailbox.time_to_leave_s().get(_ANSWER_S)
            return math.inf if left_s is None else left_s
        return math.inf

    def flush(self) -> None:
        """Wait until all events are delivered to the mailbox."""
        self._settle(None)
        if self._waiting:
            self._post()
            self._settle(None)

    def _post(self) -> None:
        self._in_flight = self._mailbox.post(self._waiting)
        self._waiting = []

    def _settle(self, timeout_s: float | None) -> bool:
        if self._in_flight is None:
            return True
        if not self._in_flight.has_come(timeout_s):
            return False
        self._in_flight.get()
        self._in_flight = None
        return True
