"""Rank 0's end of the mailbox: it sends the run's events, and hears what the driver asks the workers for.

    step k     forward, backward --what has come by now?--> all-reduce: all ranks know it --update--> followed
    mailbox    a call of rank 0 waits there, and is answered when somebody makes a request

So a request that arrives before the ranks of a step agree is followed after that step, and any other one after the next.
"""

from __future__ import annotations

import contextlib
import math
import time

from ray.exceptions import RayError

from springtide.elastic import GroupRequest
from springtide.events import Event, StepDone
from springtide.ray.train.mailbox import MailboxClient, Reply

_BEAT_S = 1.0
_ANSWER_S = 2.0
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
