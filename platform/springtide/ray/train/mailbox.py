"""The mailbox between a run's workers and its driver: events one way, requests the other.

Workers need no access to the tracking store or the console: rank 0 posts, the driver takes.

    worker, controller --MailboxClient--> Mailbox (an actor on the driver's node) <--MailboxClient-- driver
                       <--a request, as soon as it is made: rank 0 has a call there that waits for the next one

A driver may train one run after the other: its mailbox stays, because a process takes a second to start. Every call names its
run by a key, and what arrives late for an ended run is dropped.
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
from springtide.elastic.notices import TimeLeft
from springtide.events import Event, Left, StepDone, record

_BLOCK_BYTES = 8 * 2**20
_ANSWER_S = 2.0
_LEAVING = (GroupRequest.LEAVE, GroupRequest.EVACUATE)
T = TypeVar("T")


class WorkerLimit(NamedTuple):
    """What commands to the run say of its workers (``run.control``)."""

    workers: int = 0
    """Most workers; 0: as many as the config allows."""
    paused_by: str = ""
    """Who paused the run; empty if it is not paused."""
    serial: int = 0
    """Number of the change: a limit that is set again is told again."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of training that the controller needs."""

    step: int = 0
    left: bool = False
    """Whether the group has saved its state and waits to be replaced."""
    stop: bool = False
    """Whether the run was asked to stop."""
    silent_s: float = 0.0
    """Time since the group's last event or heartbeat [s]."""
    longest_s: float = math.inf
    """How long it may be silent [s]."""
    prospects: RestartForecast = dataclasses.field(default_factory=RestartForecast)
    limit: WorkerLimit = dataclasses.field(default_factory=WorkerLimit)


class _RunState:
    """What the mailbox holds for one run."""

    def __init__(self, key: str, num_steps: int, hang_s: float) -> None:
        self.key, self.hang_s = key, hang_s
        self.events: list[Event] = []
        self.arrived = asyncio.Event()
        self.asked: GroupRequest | None = None
        self.copy = False  # whether it is asked for, too
        self.groups = 0
        """Groups of workers until now."""
        self._changed = asyncio.Event()
        self.leave_by_s = math.inf
        """When the state of a group that leaves must be safe in memory, of ``time.monotonic`` [s]."""
        self.left = False
        self.last_event_s = math.inf
        self.history = RunHistory(num_steps)
        self.micro_batch: int | None = None
        self.limit = WorkerLimit()
        self.notices: dict[str, tuple[int, float]] = {}
        """Node that leaves -> its deadline as announced to Ray [ms], and when that is, of ``time.monotonic`` [s]."""

    @property
    def request(self) -> GroupRequest | None:
        """The request to the workers."""
        return self.asked or (GroupRequest.COPY if self.copy else None)

    def changed(self) -> None:
        """Wake those that wait for a request: there is another one, another group, or another run."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait until ``changed()`` is called."""
        await self._changed.wait()


class Mailbox:
    """The mailbox actor: one per driver, on its node, and for one run at a time. Ends with the driver.

    A call with the key of a run that is over does nothing and returns None.
    """

    def __init__(self, key: str, num_steps: int, hang_s: float) -> None:
        """Open the mailbox of the first run."""
        self._run = _RunState(key, num_steps, hang_s)

    async def open(self, key: str, num_steps: int, hang_s: float) -> None:
        """Open the mailbox of the next run; the one before is over."""
        before, self._run = self._run, _RunState(key, num_steps, hang_s)
        before.changed()

    async def post(self, key: str, events: Sequence[Event]) -> None:
        """See ``MailboxClient.post``."""
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
        """See ``MailboxClient.request``."""
        if followed is not None:
            await self.cancel(key, followed)
        run = self._run
        group = run.groups
        while self._run is run and run.key == key and run.groups == group and run.request is known:
            await run.change()
        return run.request if self._run is run and run.key == key else None

    async def take(self, key: str, wait_s: float) -> list[Event] | None:
        """See ``MailboxClient.take``."""
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
        """See ``MailboxClient.ask``."""
        run = self._run
        if request is GroupRequest.COPY:
            run.copy |= key == run.key
            run.changed()
            return
        weaker = run.asked is GroupRequest.STOP and request is not GroupRequest.STOP
        weaker |= run.asked in _LEAVING and request is GroupRequest.SAVE  # what leaves brings its state to safety
        if key == run.key and not weaker:
            run.asked, run.leave_by_s = request, time.monotonic() + left_s
            run.changed()

    async def time_to_leave_s(self, key: str) -> float | None:
        """See ``MailboxClient.time_to_leave_s``."""
        run = self._run
        return run.leave_by_s - time.monotonic() if key == run.key else None

    async def cancel(self, key: str, request: GroupRequest) -> None:
        """End ``request``, if it is still the newest."""
        run = self._run
        if key == run.key:
            run.copy &= request is not GroupRequest.COPY
            run.asked = None if run.asked is request else run.asked
            run.changed()

    async def heartbeat(self, key: str) -> None:
        """See ``MailboxClient.heartbeat``."""
        if key == self._run.key:
            self._run.last_event_s = time.monotonic()

    async def reset_for_new_group(self, key: str) -> None:
        """See ``MailboxClient.reset_for_new_group``."""
        run = self._run
        if key == run.key:
            run.left, run.last_event_s = False, time.monotonic()
            run.history.restart()
            run.asked, run.leave_by_s = None if run.asked in _LEAVING else run.asked, math.inf
            run.copy = False
            run.groups += 1
            run.changed()

    async def group_runs(self, key: str, workers: int) -> None:
        """See ``MailboxClient.group_runs``."""
        run, now = self._run, time.monotonic()
        if key == run.key and run.history.runs(workers, now):
            run.last_event_s = now

    async def group_formed(self, key: str) -> None:
        """See ``MailboxClient.group_formed``."""
        run, now = self._run, time.monotonic()
        if key == run.key:
            run.history.formed(now)
            run.last_event_s = now

    async def notice(self, key: str, node: str, left: TimeLeft) -> None:
        """See ``NoticeSender``."""
        run, ends_s = self._run, time.monotonic() + left.left_s
        if key == run.key and ends_s < run.notices.get(node, (0, math.inf))[1]:
            run.notices[node] = (left.deadline_ms, ends_s)

    async def notices(self, key: str) -> dict[str, TimeLeft] | None:
        """See ``MailboxClient.notices``."""
        run, now = self._run, time.monotonic()
        if key != run.key:
            return None
        return {node: TimeLeft(deadline_ms, ends_s - now) for node, (deadline_ms, ends_s) in run.notices.items()}

    async def progress(self, key: str) -> Progress | None:
        """See ``MailboxClient.progress``."""
        run = self._run
        if key != run.key:
            return None
        longest_s = run.history.longest_s(run.hang_s) if run.hang_s else math.inf
        silent_s = max(0.0, time.monotonic() - run.last_event_s)
        stop = run.asked is GroupRequest.STOP
        return Progress(run.history.step, run.left, stop, silent_s, longest_s, run.history.prospects(), run.limit)

    async def limit_workers(self, key: str, limit: WorkerLimit) -> None:
        """See ``MailboxClient.limit_workers``."""
        if key == self._run.key:
            self._run.limit = limit

    async def limit_micro_batch(self, key: str, rows: int) -> None:
        """See ``MailboxClient.limit_micro_batch``."""
        if key == self._run.key:
            self._run.micro_batch = rows

    async def largest_micro_batch(self, key: str) -> int | None:
        """See ``MailboxClient.largest_micro_batch``."""
        return self._run.micro_batch if key == self._run.key else None

    async def node(self) -> str:
        """Return the driver's node."""
        return str(ray.get_runtime_context().get_node_id())

    async def block(self) -> np.ndarray:
        """Return data to fetch, to measure the speed of the network."""
        return np.ones(_BLOCK_BYTES, np.uint8)


@dataclasses.dataclass(frozen=True)
class Reply(Generic[T]):
    """The mailbox's reply to a call. Nobody has to wait for it, unless the next call must come after it: Ray carries out the
    calls of an actor with coroutines in any order. Without a mailbox a call has no effect."""

    ref: ObjectRef[T]

    def get(self, timeout_s: float | None = None) -> T:
        """Wait for the reply. Raises RayError if the mailbox is gone or does not reply in time."""
        value: T = ray.get(self.ref, timeout=timeout_s)
        return value

    def wait(self, timeout_s: float = _ANSWER_S) -> None:
        """Wait until the call has had its effect, or cannot have one: the mailbox is gone, or too slow."""
        with contextlib.suppress(RayError):
            self.get(timeout_s)

    def has_come(self, timeout_s: float | None) -> bool:
        """Return whether the reply or an error comes in time; None waits for it."""
        return bool(ray.wait([self.ref], timeout=timeout_s)[0])


@dataclasses.dataclass(frozen=True)
class MailboxClient:
    """A client of a run's mailbox, in any process. A reply is None if the run is over."""

    actor: ActorHandle[Mailbox]
    key: str
    name: str = ""
    """Of the actor; empty if it has none."""

    def post(self, events: Sequence[Event]) -> Reply[None]:
        """Post events to the driver."""
        return Reply(self.actor.post.remote(self.key, events))

    def request(self, known: GroupRequest | None, followed: GroupRequest | None = None) -> Reply[GroupRequest | None]:
        """Reply with the request to the workers as soon as it is another than ``known``, or the group is over. One that was
        ``followed`` ends with this call: a call of its own might arrive after this one, and it would be told again."""
        return Reply(self.actor.request.remote(self.key, known, followed))

    def take(self, wait_s: float) -> Reply[list[Event]]:
        """Take everything posted since the last call; waits up to ``wait_s`` for the first event. For the current run only."""
        return Reply(self.actor.take.remote(self.key, wait_s))

    def ask(self, request: GroupRequest, left_s: float = math.inf) -> Reply[None]:
        """Ask the workers for ``request`` until the next call. STOP is never replaced, SAVE never replaces LEAVE, and COPY is
        kept apart and delivered last. ``left_s``: time until a copy in memory must be safe [s]."""
        return Reply(self.actor.ask.remote(self.key, request, left_s))

    def time_to_leave_s(self) -> Reply[float | None]:
        """Reply with the time until the copy of a group that leaves must be safe in memory [s]."""
        return Reply(self.actor.time_to_leave_s.remote(self.key))

    def heartbeat(self) -> Reply[None]:
        """Report that the group is alive, though it has no event to post."""
        return Reply(self.actor.heartbeat.remote(self.key))

    def reset_for_new_group(self) -> Reply[None]:
        """Reset the state for a group that starts: it has not left, and was not asked to."""
        return Reply(self.actor.reset_for_new_group.remote(self.key))

    def group_runs(self, workers: int) -> Reply[None]:
        """Report that the group's processes have begun: its silence counts from now on."""
        return Reply(self.actor.group_runs.remote(self.key, workers))

    def group_formed(self) -> Reply[None]:
        """Report that the group's first collective is done."""
        return Reply(self.actor.group_formed.remote(self.key))

    def notices(self) -> Reply[dict[str, TimeLeft] | None]:
        """Reply with what is left to the nodes that leave."""
        return Reply(self.actor.notices.remote(self.key))

    def progress(self) -> Reply[Progress | None]:
        """Reply with the run's progress."""
        return Reply(self.actor.progress.remote(self.key))

    def limit_workers(self, limit: WorkerLimit) -> Reply[None]:
        """Set the most workers of this group and later ones, and whether the run is paused."""
        return Reply(self.actor.limit_workers.remote(self.key, limit))

    def limit_micro_batch(self, rows: int) -> Reply[None]:
        """Set the largest micro-batch allowed for later groups, because more did not fit [rows]."""
        return Reply(self.actor.limit_micro_batch.remote(self.key, rows))

    def largest_micro_batch(self) -> Reply[int | None]:
        """Reply with the largest micro-batch allowed; None if there is no limit [rows]."""
        return Reply(self.actor.largest_micro_batch.remote(self.key))

    def fetch_speed(self) -> float:
        """Measure the speed of the network from the driver's node to this one; 0 if they are the same [bytes/s]."""
        if ray.get(self.actor.node.remote()) == ray.get_runtime_context().get_node_id():
            return 0.0
        begin = time.perf_counter()
        block = ray.get(self.actor.block.remote())
        assert block.all()
        return _BLOCK_BYTES / (time.perf_counter() - begin)


@dataclasses.dataclass(frozen=True)
class NoticeSender:
    """Sends notices to the mailbox of this name. It holds no handle of it: Ray warns of handles among the arguments of an actor
    that it restarts."""

    name: str
    key: str

    def __call__(self, node: str, left: TimeLeft) -> None:
        """Report when a node leaves, as its watcher says; an earlier report of an earlier end stands. Waits until it has
        arrived, for a moment at most."""
        with contextlib.suppress(RayError, ValueError):  # the driver is gone, and its mailbox
            ray.get(ray.get_actor(self.name).notice.remote(self.key, node, left), timeout=_ANSWER_S)


def open_mailbox(
    name: str | None, num_steps: int = 0, hang_s: float = 0.0, before: MailboxClient | None = None
) -> MailboxClient:
    """Open the mailbox of a new run, in the actor of the run ``before``, else in a new one on this node. With ``name`` it is
    the cluster's only one of that name; raises ValueError if there is one already."""
    key = secrets.token_hex(8)
    if before is not None:
        ray.get(before.actor.open.remote(key, num_steps, hang_s))
        return MailboxClient(before.actor, key, before.name)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Mailbox).options(name=name, num_cpus=0, scheduling_strategy=here)
    return MailboxClient(actor.remote(key, num_steps, hang_s), key, name or "")


# Rank 0's end of the mailbox: it sends the run's events, and hears what the driver asks the workers for.
#
# step k     forward, backward --what has come by now?--> all-reduce: all ranks know it --update--> followed
# mailbox    a call of rank 0 waits there, and is answered when somebody makes a request
#
# So a request that arrives before the ranks of a step agree is followed after that step, and any other one after the next.

_BEAT_S = 1.0
_ONCE = (GroupRequest.COPY, GroupRequest.SAVE)
"""Requests after which a group trains on: it is told each once."""


class EventSender:
    """Rank 0's end. Never waits for the driver in a step: while a post is in flight, events are collected for the next."""

    def __init__(self, mailbox: MailboxClient) -> None:
        self._mailbox = mailbox
        self._waiting: list[Event] = []
        self._in_flight: Reply[None] | None = None
        self._asked: GroupRequest | None = None
        self._request = mailbox.request(None)
        self._beat_s = -math.inf

    def __call__(self, event: Event) -> None:
        """Send one event. If it is not a step (a checkpoint, the end), it is delivered when this returns."""
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
        """Return the driver's request, if it has reached this process; a save or a copy is returned once. Does not wait."""
        if not self._request.has_come(0):
            return self._asked
        asked = self._request.get()
        once = asked in _ONCE
        self._asked = None if once else asked
        self._request = self._mailbox.request(self._asked, asked if once else None)
        return asked

    def time_to_leave_s(self) -> float:
        """Return how long the copy in memory of a group that was asked to leave may take; infinite if the driver does not say
        [s]."""
        with contextlib.suppress(RayError):
            left_s = self._mailbox.time_to_leave_s().get(_ANSWER_S)
            return math.inf if left_s is None else left_s
        return math.inf

    def flush(self) -> None:
        """Wait until everything is delivered."""
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
