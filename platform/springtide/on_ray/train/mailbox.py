"""The mailbox between a run's workers and its driver: events one way, requests the other.

Workers need no access to the tracking store or the console: rank 0 posts, the driver takes.

    worker, controller --MailboxHandle--> Mailbox (an actor on the driver's node) <--MailboxHandle-- driver

A driver may train one run after the other: its mailbox stays, because a process takes a second to start. What arrives late for
an ended run is dropped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
import time
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.elastic import Interrupt
from springtide.elastic.forecast import RunHistory
from springtide.elastic.policy import RestartForecast
from springtide.events import EVENTS, Event, StepDone, record

BLOCK_BYTES = 8 * 2**20
_LEAVING = {Interrupt.LEAVE.value, Interrupt.EVACUATE.value}


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of training that the controller needs."""

    step: int = 0
    left: bool = False
    """Whether the group has saved its state and waits to be replaced."""
    stop: bool = False
    """Whether the run was asked to stop."""
    silent_s: float = 0.0
    """Time since the group's last event [s]."""
    longest_s: float = math.inf
    """How long it may be silent [s]."""
    prospects: RestartForecast = dataclasses.field(default_factory=RestartForecast)


class _RunMailbox:
    """The mailbox of one run; ``MailboxHandle`` documents its methods."""

    def __init__(self, num_steps: int = 0, hang_s: float = 0.0) -> None:
        self._events: list[dict[str, Any]] = []
        self._arrived = asyncio.Event()
        self._asked: str | None = None
        self._left = False
        self._hang_s = hang_s
        self._heard_s = math.inf
        self._history = RunHistory(num_steps)
        self._micro_batch: int | None = None

    async def post(self, events: list[dict[str, Any]]) -> str | None:
        """See ``MailboxHandle.post``."""
        for one in events:
            self._left |= one["kind"] == "left"
            if not EVENTS[one["kind"]].from_controller:
                self._heard_s = time.monotonic()
            self._history.hear(one)
        self._events += events
        self._arrived.set()
        return self._asked

    async def reset_for_new_group(self) -> None:
        """See ``MailboxHandle.reset_for_new_group``."""
        self._left, self._heard_s = False, math.inf
        self._asked = None if self._asked in _LEAVING else self._asked

    async def progress(self) -> Progress:
        """See ``MailboxHandle.progress``."""
        longest_s = self._history.longest_s(self._hang_s) if self._hang_s else math.inf
        silent_s = max(0.0, time.monotonic() - self._heard_s)
        stop = self._asked == Interrupt.STOP.value
        return Progress(self._history.step, self._left, stop, silent_s, longest_s, self._history.prospects())

    async def limit(self, micro_batch: int | None = None) -> int | None:
        """See ``MailboxHandle.limit``."""
        self._micro_batch = micro_batch or self._micro_batch
        return self._micro_batch

    async def take(self, wait_s: float) -> list[dict[str, Any]]:
        """See ``MailboxHandle.take``."""
        if not self._events:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), wait_s)
            except TimeoutError:
                return []
        taken, self._events = self._events, []
        return taken

    async def ask(self, interrupt: str | None) -> None:
        """See ``MailboxHandle.ask``."""
        if not (self._asked == Interrupt.STOP.value and interrupt in _LEAVING):
            self._asked = interrupt


class Mailbox:
    """The mailbox actor: one per driver, on its node, and for one run at a time. Ends with the driver."""

    def __init__(self, key: str, num_steps: int, hang_s: float) -> None:
        """Open the mailbox of the first run."""
        self._key, self._line = key, _RunMailbox(num_steps, hang_s)

    async def open(self, key: str, num_steps: int, hang_s: float) -> None:
        """Open the mailbox of the next run; the one before is over."""
        self._key, self._line = key, _RunMailbox(num_steps, hang_s)

    async def call(self, key: str, name: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of a run's mailbox; None if the run is over."""
        return await getattr(self._line, name)(*arguments) if key == self._key else None

    async def node(self) -> str:
        """Return the driver's node."""
        return str(ray.get_runtime_context().get_node_id())

    async def block(self) -> np.ndarray:
        """Return data to fetch, to measure the speed of the network."""
        return np.ones(BLOCK_BYTES, np.uint8)


class MailboxHandle(NamedTuple):
    """A handle of a run's mailbox. Calls run in the mailbox's actor and return references to their results."""

    actor: Any
    key: str

    def post(self, events: list[dict[str, Any]]) -> Any:
        """Post events to the driver; returns the request to the workers, if any."""
        return self._call("post", events)

    def take(self, wait_s: float) -> Any:
        """Take everything posted since the last call; waits up to ``wait_s`` for the first event."""
        return self._call("take", wait_s)

    def ask(self, interrupt: str | None) -> Any:
        """Ask the workers for ``interrupt`` until the next call; a request to leave does not replace one to stop."""
        return self._call("ask", interrupt)

    def reset_for_new_group(self) -> Any:
        """Reset the state for a group that starts: it has not left, and was not asked to."""
        return self._call("reset_for_new_group")

    def progress(self) -> Any:
        """Return the run's ``Progress``; None if the run is over, as for all calls."""
        return self._call("progress")

    def limit(self, micro_batch: int | None = None) -> Any:
        """Return the largest micro-batch allowed, because more did not fit; None if unknown [rows]. A value given holds from
        now on, for later groups."""
        return self._call("limit", micro_batch)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self.actor.call.remote(self.key, name, arguments)


def open_mailbox(
    name: str | None, num_steps: int = 0, hang_s: float = 0.0, before: MailboxHandle | None = None
) -> MailboxHandle:
    """Open the mailbox of a new run, in the actor of the run ``before``, else in a new one on this node. With ``name`` it is
    the cluster's only one of that name; raises ValueError if there is one already."""
    key = secrets.token_hex(8)
    if before is not None:
        ray.get(before.actor.open.remote(key, num_steps, hang_s))
        return before._replace(key=key)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Mailbox).options(name=name, num_cpus=0, scheduling_strategy=here)
    return MailboxHandle(actor.remote(key, num_steps, hang_s), key)


class EventSender:
    """Rank 0's end. Never waits for the driver in a step: while a post is in flight, events are collected for the next."""

    def __init__(self, control: MailboxHandle) -> None:
        self._control = control
        self._waiting: list[dict[str, Any]] = []
        self._under_way: Any = None
        self._asked: Interrupt | None = None

    def __call__(self, event: Event) -> None:
        """Send one event. If it is not a step (a checkpoint, the end), it is delivered when this returns."""
        self._waiting.append(record(event))
        if not isinstance(event, StepDone):
            self.flush()
        elif self._settle(0):
            self._post()

    def interrupt(self) -> Interrupt | None:
        """Return the driver's request, as of the last post that was answered; a save is returned once."""
        asked = self._asked
        if asked is Interrupt.SAVE:
            self._asked = None
            self._control.ask(None)
        return asked

    def flush(self) -> None:
        """Wait until everything is delivered."""
        self._settle(None)
        if self._waiting:
            self._post()
            self._settle(None)

    def _post(self) -> None:
        self._under_way = self._control.post(self._waiting)
        self._waiting = []

    def _settle(self, timeout: float | None) -> bool:
        if self._under_way is None:
            return True
        done, _ = ray.wait([self._under_way], timeout=timeout)
        if done:
            asked = ray.get(self._under_way)
            self._asked = Interrupt(asked) if asked else None
            self._under_way = None
        return bool(done)
