"""The stage of a drill: what happens to the nodes of its cluster, at a step or when a process reaches a fault point."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from springtide.app.fault_watch import Reached

NOTICE_S = 12.0
"""Time between a notice and the loss [s]: a tenth of what clouds give."""
_OVERDUE = 40
"""An act at a fault point that no process reaches is carried out this many steps later [steps]."""


@dataclasses.dataclass(frozen=True)
class Act:
    """A change of the cluster, and when it happens."""

    step: int
    what: str
    """``kill``, ``drain``, ``hang`` or ``add``."""
    nodes: int = 1
    workers: int = 0
    """Wait until this number of workers trains; 0 for any number."""
    at: str = ""
    """Name of the fault point at which it happens, as ``restore-before``, when ``step`` is done; empty for any moment."""

    def __str__(self) -> str:
        many = f"{self.nodes} nodes" if self.nodes > 1 else "a node"
        verb = {"kill": "is killed", "drain": "is announced to leave", "hang": "hangs", "add": "joins"}[self.what]
        where = f" at {self.at}" if self.at else ""
        text = f"{many} {verb} at step {self.step}{where}"
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


class Stage:
    """Carries out a scenario's acts: at their steps in the thread that listens to events, at fault points in another one;
    training continues meanwhile."""

    def __init__(self, cluster: Any, acts: tuple[Act, ...], notice_file: str, say: Callable[[str], None]) -> None:
        self._cluster, self.to_come, self._say = cluster, list(acts), say
        self._notice_file = notice_file
        self._doomed: dict[str, threading.Timer] = {}
        self._step = 0
        self._acting = threading.Lock()
        self.done: list[ActDone] = []

    def reach(self, step: int, workers: int) -> None:
        """Carry out the acts that are due when ``workers`` workers have finished ``step``."""
        with self._acting:
            self._step = step
            while self.to_come and self._is_due(self.to_come[0], step, workers):
                act = self.to_come.pop(0)
                for _ in range(act.nodes):
                    self._do(act.what)

    def pass_point(self, reached: Reached) -> None:
        """Carry out the act that is due when a process reaches a fault point, on its node; it waits for that."""
        if not self.to_come or self.to_come[0].at != reached.name:  # most of what is reached
            return
        with self._acting:
            if self.to_come and self.to_come[0].at == reached.name and self.to_come[0].step <= self._step:
                self._do(self.to_come.pop(0).what, self._cluster.node_of(reached.pid), reached.name)

    def end(self) -> None:
        """Cancel announced losses: training is over."""
        for timer in self._doomed.values():
            timer.cancel()
            timer.join()

    def _is_due(self, act: Act, step: int, workers: int) -> bool:
        return act.step + _OVERDUE * bool(act.at) <= step and act.workers in (0, workers)

    def _do(self, what: str, here: str = "", at: str = "") -> None:
        """Carry out an act, on the node ``here`` if that stays."""
        node = self._cluster.add() if what == "add" else self._next(here)
        self._note(what, node, at)
        if what == "kill":
            self._cluster.kill(node)
        elif what == "hang":
            self._cluster.halt(node)
        elif what == "drain":
            Path(self._notice_file.replace("{node}", node)).write_text(f"{NOTICE_S}")
            self._doomed[node] = threading.Timer(NOTICE_S, self._go, (node,))
            self._doomed[node].start()

    def _next(self, here: str) -> str:
        stays = [node for node in self._cluster.nodes if node not in self._doomed]
        return here if here in stays else stays[0]

    def _go(self, node: str) -> None:
        self._cluster.kill(node)
        self._note("gone", node)

    def _note(self, what: str, node: str, at: str = "") -> None:
        self.done.append(ActDone(self._step, what, node[:8], time.time(), at))
        words = {"kill": "is killed", "drain": f"will leave in {NOTICE_S:.0f} s", "add": "joins", "gone": "is gone"}
        words["hang"] = "has its worker stopped"
        self._say(f"step {self._step}: node {node[:8]} {words[what]}{f' at {at}' if at else ''}")
