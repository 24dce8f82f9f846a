"""The scenarios of a drill (a local run with real faults): what changes in the cluster and when, the run's config, and the
class that makes the changes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from springtide import config as configs
from springtide.config import Config
from springtide.elastic.copies import place
from springtide.elastic.traces import smaller
from springtide.errors import ConfigError, explain
from springtide.planning.simulation import read_trace

NOTICE_S = 12.0
"""Time between the notice that a node will be lost and the loss, unless a scenario sets another time [s]. It is a tenth of the
usual notice of clouds."""
_TRACE_NODES = 4
_STEPS_BETWEEN = 100
"""When a drill (a local run with real faults) replays a record of spot capacity: mean number of steps between two changes."""
_SHORTEST_NOTICE_S, _LONGEST_NOTICE_S = 8.0, 600.0
_ENDLESS = 100_000


@dataclasses.dataclass(frozen=True)
class Act:
    """A change of the cluster in a drill (a local run with real faults), and when it happens."""

    step: int
    what: str
    """``kill``, ``drain`` (a loss with a notice), ``hang`` or ``add``. ``kill-copies`` kills a node together with the nodes
    that hold copies of its snapshots. ``wait`` changes nothing, but waits until ``workers`` workers train."""
    nodes: int = 1
    workers: int = 0
    """The change happens only when this number of workers trains; 0: with any number."""
    notice_s: float = NOTICE_S
    """For ``drain``: time between the notice that the node will be lost and the loss [s]."""

    def __str__(self) -> str:
        if self.what == "wait":
            return f"{self.workers} workers train"
        many = f"{self.nodes} nodes" if self.nodes > 1 else "a node"
        verb = {"kill": "is killed", "drain": "is announced to leave", "hang": "hangs", "add": "joins"}
        verb["kill-copies"] = "is killed together with its copies"
        text = f"{many} {verb[self.what]} at step {self.step}"
        return text.replace("s is", "s are").replace("s joins", "s join") if self.nodes > 1 else text


@dataclasses.dataclass(frozen=True)
class ActDone:
    """A change of the cluster that a drill (a local run with real faults) has carried out on one node."""

    step: int
    """The last step that was done before the change, counted from 1."""
    what: str
    """Kind of the change, as in ``Act``. ``gone``: a node whose loss was announced earlier is killed."""
    node: str
    """The first 8 characters of the node's id."""
    time_s: float
    """When the change was carried out, in seconds since 1970."""
    notice_s: float = 0.0
    """For ``drain``: time between the notice that the node will be lost and the loss; else 0 [s]."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """The plan of a drill (a local run with real faults): workers at the start, changes of the cluster, and number of steps."""

    workers: int
    acts: tuple[Act, ...]
    steps: int
    about: str
    most: int = 0
    """Largest number of workers at any time, if it is above ``workers`` (the number at the start); else 0."""
    steps_after: int = 0
    """Stop training this many steps after all changes of the cluster, however long these take; 0: train all ``steps``."""
    strategy: str = "zero3"
    """Value of ``parallel.strategy``."""

    @property
    def max_workers(self) -> int:
        """Largest number of workers at any time of the scenario."""
        return max(self.workers, self.most)


def with_notice(notice_s: float) -> Scenario:
    """Return a scenario in which a node is lost ``notice_s`` after a notice [s]. Raises ConfigError if the time is too short or
    too long."""
    if not _SHORTEST_NOTICE_S <= notice_s <= _LONGEST_NOTICE_S:
        limits = f"is not from {_SHORTEST_NOTICE_S:g} to {_LONGEST_NOTICE_S:g} s"
        raise ConfigError(explain("--notice", notice_s, limits, "give your cloud's notice time, such as 30 or 120"))
    about = f"a node is announced to leave in {notice_s:g} s, and leaves"
    return Scenario(3, (Act(40, "drain", workers=3, notice_s=notice_s),), _ENDLESS, about, steps_after=40)


def traced(changes: int, trace: str) -> Scenario:
    """Return a scenario of the first ``changes`` changes in the record of spot capacity ``trace`` (a path), scaled to a few
    nodes and a short run. Raises ConfigError if the record has no change."""
    numbers = smaller(read_trace(trace), _TRACE_NODES)[: changes + 1]
    if len(numbers) < 2:
        raise ConfigError(explain("--trace", trace, "has no change of the number of nodes", "give another record"))
    (begin_s, here), (end_s, _) = numbers[0], numbers[-1]
    first, acts = here, []
    for time_s, number in numbers[1:]:
        step = 20 + round((time_s - begin_s) / (end_s - begin_s) * _STEPS_BETWEEN * len(numbers))
        acts.append(Act(step, "add" if number > here else "drain", abs(number - here)))
        here = number
    about = f"{len(acts)} changes of {Path(trace).name}, on at most {_TRACE_NODES} nodes"
    return Scenario(first, tuple(acts), acts[-1].step + 60, about, most=_TRACE_NODES)


SCENARIOS: dict[str, Callable[..., Scenario]] = {
    "kill": lambda *_: Scenario(3, (Act(40, "kill"),), 100, "a node and all its processes are killed"),
    "drain": lambda *_: with_notice(NOTICE_S),
    "copies": lambda *_: Scenario(
        4,
        (Act(40, "kill-copies", workers=4),),
        100,
        "a node and the node with the copy of its snapshots are killed at once; the others have the state on their devices",
        strategy="ddp",
    ),
    "regrow": lambda *_: Scenario(
        3,
        (Act(40, "kill", workers=3), Act(60, "add", workers=2), Act(60, "wait", workers=3)),
        _ENDLESS,
        "a node is killed, another one joins",
        steps_after=40,
    ),
    "hang": lambda *_: Scenario(
        3, (Act(40, "hang", workers=3),), 60, "a worker's process is stopped and does not answer"
    ),
    "resize": lambda *_: Scenario(
        8,
        (
            Act(15, "drain", 3, 8),
            Act(35, "add", 2, 5),
            Act(60, "add", 1, 7),
            Act(80, "kill", 1, 8),
            Act(80, "wait", 1, 7),
        ),
        _ENDLESS,
        "8 -> 5 -> 7 -> 8 -> 7 workers: three leave with a notice, two join, another joins, one leaves without",
        steps_after=40,
    ),
    "all": lambda *_: Scenario(
        3,
        (
            Act(15, "drain", workers=3),
            Act(20, "kill", workers=2),
            Act(30, "add", workers=1),
            Act(30, "wait", workers=2),
        ),
        _ENDLESS,
        "one leaves with a notice, one without, one joins",
        steps_after=20,
    ),
    "trace": traced,
}


def config_of(scenario: Scenario, root: str) -> Config:
    """Return the config of a drill (a local run with real faults): the tiny recipe with exact sums of gradients, so that any
    error in a restart or resize shows in the losses."""
    base = configs.recipes.tiny()
    rows = 24
    changes = {
        "run.root": root,
        "shards.root": f"{root}/datasets",
        "model.num_layers": 2,
        "model.dim": 64,
        "model.ffn_dim": 176,
        "stream.global_batch": rows,
        "stream.max_epochs": 1e6,  # overfitting does not matter: the drill's model is not used
        "stream.lanes": 12 if scenario.workers > 4 else 4,
        "parallel.reduction": "fp64",
        "parallel.strategy": scenario.strategy,
        "parallel.threads": 1,
        "elastic.min_workers": 1,
        "elastic.max_workers": scenario.max_workers,
        "elastic.grow": "always",
        "elastic.hang": 15.0,
        "elastic.notices": "file",
        "elastic.notice_file": f"{root}/notice-{{node}}",
        "train.total": scenario.steps * rows * base.shards.sequence_length,
        "checkpoint.memory_every": 1,
        "train.eval_tokens": 0,
        "train.sample_tokens": 0,
        "track.mlflow_uri": "off",
        "track.progress": False,
    }
    return base.override(changes)


class Stage:
    """Carries out a scenario's changes of the cluster, such as killing a node, each when training has reached the step planned
    for it. Training continues meanwhile."""

    def __init__(self, cluster: Any, acts: tuple[Act, ...], notice_file: str, say: Callable[[str], None]) -> None:
        self._cluster, self.to_come, self._say = cluster, list(acts), say
        self._notice_file = notice_file
        self._doomed: dict[str, threading.Timer] = {}
        self._step = 0
        self.over_at: int | None = None
        """The step after which all changes of the cluster had happened, including announced losses; None before that step."""
        self.done: list[ActDone] = []

    def reach(self, step: int, workers: int) -> None:
        """Carry out the changes of the cluster that are due when ``workers`` workers have finished ``step``."""
        self._step = step
        while self.to_come and self._is_due(self.to_come[0], step, workers):
            act = self.to_come.pop(0)
            for _ in range(act.nodes):
                self._do(act)
        if self.over_at is None and not self.to_come and not any(one.is_alive() for one in self._doomed.values()):
            self.over_at = step

    def end(self) -> None:
        """Cancel losses of nodes that were announced but have not happened yet, because training is over."""
        for timer in self._doomed.values():
            timer.cancel()
            timer.join()

    def _is_due(self, act: Act, step: int, workers: int) -> bool:
        return act.step <= step and act.workers in (0, workers)

    def _do(self, act: Act, here: str = "") -> None:
        """Carry out a change. ``add`` adds a new node. Other changes affect the node ``here``; if ``here`` is empty, they
        affect the oldest node without a notice of its loss."""
        if act.what == "wait":
            return
        node = self._cluster.add() if act.what == "add" else here or self._staying()[0]
        if act.what == "kill-copies":
            lost = [node, *place(self._staying(), {}, 1)[node]]
            for one in lost:
                self._note(act, one)
            self._cluster.kill(*lost)
            return
        self._note(act, node)
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

    def _go(self, node: str) -> None:
        self._cluster.kill(node)
        self._note(Act(self._step, "gone"), node)

    def _note(self, act: Act, node: str) -> None:
        notice_s = act.notice_s if act.what == "drain" else 0.0
        self.done.append(ActDone(self._step, act.what, node[:8], time.time(), notice_s))
        words = {"kill": "is killed", "drain": f"will leave in {notice_s:.0f} s", "add": "joins", "gone": "is gone"}
        words |= {"hang": "has its worker stopped", "kill-copies": "is killed, one of those with a part of the state"}
        self._say(f"step {self._step}: node {node[:8]} {words[act.what]}")
