"""What goes wrong, and when: drawn from the seed, with a taste for moments in which nobody trains."""

from __future__ import annotations

import functools
from typing import Any

from simulation.clock import Clock, Process
from simulation.cluster import Cluster
from simulation.store import Store

KINDS = (
    *("kill", "kill", "notice", "notice", "notices", "join", "freeze", "freezes", "store", "answers", "head"),
    *("driver", "stop", "second", "liar", "trap", "trap", "crashes"),
)
PHASES = ("start", "rendezvous", "claim", "restore", "first step", "step", "save", "leave", "end")
"""Of a worker: a trap stops the first that comes to one."""
GENTLE = ("notice", "notice", "notices", "join", "stop")
"""After these no step is lost."""


class Faults:
    """Draws faults and lets them happen."""

    def __init__(self, clock: Clock, cluster: Cluster, store: Store, simulated: Any, verbose: bool) -> None:
        self.clock, self.cluster, self.store, self.simulated, self._verbose = clock, cluster, store, simulated, verbose
        self.driver: Process | None = None
        self.done: list[str] = []
        self._gentle = False
        """Whether every loss is announced in time."""
        self._crashed = False

    def plan(self, number: int, until_s: float) -> None:
        """Draw ``number`` faults; half of them follow another one closely."""
        draw, at_s = self.clock.random, 0.0
        self._gentle = draw.random() < 0.2
        kinds = GENTLE if self._gentle else KINDS
        for _ in range(number):
            close = draw.random() < 0.5 and at_s > 0
            if close:
                at_s += draw.uniform(0.0, 15.0)
            elif self._gentle:  # within the run, which lasts longer the longer its steps are
                at_s += draw.uniform(0.0, 15.0 * self.simulated.setting.step_s)
            else:
                at_s = draw.uniform(0.0, until_s / 3)
            self.clock.at(at_s, functools.partial(self._happen, draw.choice(kinds)))
        self.clock.at(until_s, self._heal)

    def note(self, what: str) -> None:
        """Write down what happened."""
        self.done.append(f"{self.clock.now:.1f} s: {what}")
        if self._verbose:
            print(f"  {self.done[-1]}")

    def _happen(self, kind: str) -> None:
        draw = self.clock.random
        alive = [one.id for one in self.cluster.alive]
        name = draw.choice(alive) if alive else ""
        if kind in ("kill", "notice", "notices", "freeze", "liar") and not name:
            return
        left_s = draw.choice([5.0, 30.0, 60.0, 120.0])
        if self._gentle:
            left_s = max(left_s, 30.0, 5.0 * self.simulated.setting.step_s + 10.0)
        self.note(f"{kind} {name if kind in ('kill', 'notice', 'freeze', 'liar') else ''}")
        self.simulated.watch.only_notices &= self._gentle
        match kind:
            case "kill":
                self.cluster.kill(name)
                self._join_later()
            case "notice":
                self.cluster.notice(name, left_s)
                self._join_later()
            case "notices":
                for one in alive:
                    self.cluster.notice(one, left_s + draw.uniform(0.0, 5.0))
                    self._join_later()
            case "join":
                self.cluster.join()
            case "freeze":
                self.cluster.freeze(name, draw.choice([10.0, 60.0, 400.0]))
            case "freezes":
                seconds = draw.choice([10.0, 60.0, 400.0])
                for one in alive:
                    self.cluster.freeze(one, seconds)
            case "trap":
                phase, only = draw.choice(PHASES), draw.random() < 0.5
                self.cluster.traps[phase] = functools.partial(self._trapped, phase, only)
            case "store":
                self.store.away_until_s = self.clock.now + draw.choice([5.0, 60.0, 400.0])
            case "answers":
                self.store.lost_answers = 0.2
                self.clock.after(60.0, functools.partial(setattr, self.store, "lost_answers", 0.0))
            case "liar":
                self.cluster.machines[name].lies = True
            case "head":
                self.cluster.head_away_until_s = self.clock.now + draw.choice([5.0, 50.0])
            case "crashes":
                if not self._crashed:  # a node is left out for longer each time, and than ``check.FORMS_S``
                    self._crashed = True
                    self.simulated.crash(draw.choice([10.0, 40.0]))
            case "driver":
                if self.driver is not None:
                    self.driver.kill()
            case "stop":
                for host in self.simulated.asked:
                    self.simulated.asked[host] = True
            case "second":
                host = draw.choice(["host0", "host2"])
                self.simulated.drive(self.simulated.setting.config, host, resume=True)

    def _trapped(self, phase: str, worker_only: bool, name: str) -> None:
        self.note(f"{name} stopped in phase {phase}{', its worker only' if worker_only else ''}")
        self.cluster.freeze(name, 600.0, worker_only)

    def _join_later(self) -> None:
        self.clock.after(self.clock.random.uniform(10.0, 200.0), self.cluster.join)

    def _heal(self) -> None:
        """Whatever happened: from now on there are nodes enough."""
        for _ in range(2):
            self.cluster.join()
