"""The stage of a drill: what happens to the nodes of its cluster, at a step or when a process reaches a fault point."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from springtide.app.fault_watch import Reached
from springtide.elastic.copies import place

NOTICE_S = 12.0
"""Time between a notice and the loss, unless a scenario says another [s]: a tenth of what clouds give."""
_OVERDUE = 40
"""An act at a fault point that no process reaches is carried out this many steps later [steps]."""


@dataclasses.dataclass(frozen=True)
class Act:
    """A change of the cluster, and when it happens."""

    step: int
    what: str
    """``kill``, ``drain``, ``hang`` or ``add``; ``kill-copies`` kills a node and those with copies of its snapshots at once."""
    nodes: int = 1
    workers: int = 0
    """Wait until this number of workers trains; 0 for any number."""
    at: str = ""
    """Name of the fault point at which it happens, as ``restore-before``, when ``step`` is done; empty for any moment."""
    notice_s: float = NOTICE_S
    """Time between the notice and the loss, for ``drain`` [s]."""

    def __str__(self) -> str:
        many = f"{self.nodes} nodes" if self.nodes > 1 else "a node"
        verb = {"kill": "is killed", "drain": "is announced to leave", "hang": "hangs", "add": "joins"}
        verb["kill-copies"] = "is killed together with its copies"
        where = f" at {self.at}" if self.at else ""
        text = f"{many} {verb[self.what]} at step {self.step}{where}"
        return text.replace("s is", "s are").replace("s joins", "s join") if self.nodes > 1 else text


@dataclasses.dataclass(frozen=True)
class ActDone:
    """A change of the cluster, as it was carried out on one node."""

    step: int
    """The step that was done last, counted from 1."""
    what: str
    """As of ``Act``; ``gone`` when a node leaves that was announced to."""
    node: str
    """The first 8 characters of its id."""
    time_s: float
    """Seconds since 1970."""
    at: str = ""
    """The fault point at which it happened, if at any: then perhaps while no group trained."""
    notice_s: float = 0.0
    """Time between the notice and the loss, for ``drain`` [s]."""


class Stage:
    """Carries out a scenario's acts: at their steps in the thread that listens to events, at fault points in another one;
    training continues meanwhile."""

    def __init__(self, cluster: Any, acts: tuple[Act, ...], notice_file: str, say: Callable[[str], None]) -> None:
        self._cluster, self.to_come, self._say = cluster, list(acts), say
        self._notice_file = notice_file
        self._doomed: dict[str, threading.Timer] = {}
        self._step = 0
        self._acting = threading.Lock()
        self.over_at: int | None = None
        """The step after which all had happened, announced losses too; None before."""
        self.done: list[ActDone] = []

    def reach(self, step: int, workers: int) -> None:
        """Carry out the acts that are due when ``workers`` workers have finished ``step``."""
        with self._acting:
            self._step = step
            while self.to_come and self._is_due(self.to_come[0], step, workers):
                act = self.to_come.pop(0)
                for _ in range(act.nodes):
                    self._do(act)
            if self.over_at is None and not self.to_come and not any(one.is_alive() for one in self._doomed.values()):
                self.over_at = step

    def pass_point(self, reached: Reached) -> None:
        """Carry out the act that is due when a process reaches a fault point, on its node; it waits for that."""
        if not self.to_come or self.to_come[0].at != reached.name:  # most of what is reached
            return
        with self._acting:
            if self.to_come and self.to_come[0].at == reached.name and self.to_come[0].step <= self._step:
                self._do(self.to_come.pop(0), self._cluster.node_of(reached.pid), reached.name)

    def end(self) -> None:
        """Cancel announced losses: training is over."""
        for timer in self._doomed.values():
            timer.cancel()
            timer.join()

    def _is_due(self, act: Act, step: int, workers: int) -> bool:
        return act.step + _OVERDUE * bool(act.at) <= step and act.workers in (0, workers)

    def _do(self, act: Act, here: str = "", at: str = "") -> None:
        """Carry out an act, on the node ``here`` if that stays."""
        node = self._cluster.add() if act.what == "add" else self._next(here)
        if act.what == "kill-copies":
            lost = [node, *place(self._staying(), {}, 1)[node]]
            for one in lost:
                self._note(act, one, at)
            self._cluster.kill(*lost)
            return
        self._note(act, node, at)
        if act.what == "kill":
            self._cluster.kill(node)
        elif act.what == "hang":
            self._cluster.halt(node)
        elif act.what == "drain":
            Path(self._notice_file.replace("{node}", node)).write_text(f"{act.notice_s}")
            self._doomed[node] = threading.Timer(act.notice_s, self._go, (node,))
            self._doomed[node].start()

    def _staying(self) -> list[str]:
        return [node for node in self._cluster.nodes if node not in self._doomed]

    def _next(self, here: str) -> str:
        stays = self._staying()
        return here if here in stays else stays[0]

    def _go(self, node: str) -> None:
        self._cluster.kill(node)
        self._note(Act(self._step, "gone"), node)

    def _note(self, act: Act, node: str, at: str = "") -> None:
        notice_s = act.notice_s if act.what == "drain" else 0.0
        self.done.append(ActDone(self._step, act.what, node[:8], time.time(), at, notice_s))
        words = {"kill": "is killed", "drain": f"will leave in {notice_s:.0f} s", "add": "joins", "gone": "is gone"}
        words |= {"hang": "has its worker stopped", "kill-copies": "is killed, one of those with a part of the state"}
        self._say(f"step {self._step}: node {node[:8]} {words[act.what]}{f' at {at}' if at else ''}")
