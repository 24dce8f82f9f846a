"""Requests to a worker group: to save, stop, leave, or copy snapshots to other nodes. A request to one rank reaches all ranks
in the step's message."""

from __future__ import annotations

from collections.abc import Callable

from springtide.elastic import GroupRequest
from springtide.training.message import StepMessage
from springtide.training.part import Part, Share, StepResult, Verdict


class Requests(Part):
    """Collects the requests to one rank, from outside and from other parts, and shares them with all ranks."""

    def __init__(self) -> None:
        self.from_outside: Callable[[], GroupRequest | None] = lambda: None
        """Returns the request to this rank, or None. Called just before the step's all-reduce, so that all ranks receive it in
        the same step. Must not block."""
        self._asked: set[GroupRequest] = set()

    def ask(self, request: GroupRequest) -> None:
        """Add a request to the next step's message."""
        self._asked.add(request)

    def contribute(self, message: StepMessage, share: Share) -> None:
        asked, self._asked = {*self._asked, self.from_outside()}, set()
        for kind in GroupRequest:
            message.any(f"request: {kind.name.lower()}", kind in asked)

    def receive(self, result: StepResult) -> None:
        found = [kind for kind in GroupRequest if result.agreed[f"request: {kind.name.lower()}"]]
        result.requests = frozenset(found)

    def verdict(self, result: StepResult) -> Verdict:
        if GroupRequest.STOP in result.requests:
            return Verdict.STOP
        leaves = result.requests & {GroupRequest.LEAVE, GroupRequest.EVACUATE}
        return Verdict.LEAVE if leaves else Verdict.CONTINUE
