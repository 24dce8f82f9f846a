"""Ray's part in a pool of processes, on a clock of its own: actors whose answers come at a given time, or never."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError

from springtide.elastic.copies import LiveShard
from springtide.elastic.health import Health
from springtide.ray.cluster import liveness, nodes
from springtide.ray.train import process_pool
from springtide.ray.train.process_pool import load_worker
from springtide.ray.train.worker import let_go, settle, warm_up

FIT = Health(1e12, 1e11)


class Ref:
    """An answer, or an error, from a time on."""

    def __init__(self, value: object, at_s: float = 0.0) -> None:
        self.value, self.at_s = value, at_s


class Actor:
    """A worker's process on a node."""

    def __init__(self, ray: FakeRay, node: str) -> None:
        self.ray, self.node, self.is_alive = ray, node, True
        self.execute = SimpleNamespace(remote=self._execute)
        self.get_metadata = SimpleNamespace(
            remote=lambda: self._answer(ray.metadata(self), ray.answer_s.get(node, 0.0))
        )

    def _answer(self, value: object, after_s: float) -> Ref:
        if not self.is_alive:
            return Ref(ActorDiedError())
        return Ref(value, self.ray.now_s + after_s)

    def _execute(self, function: Callable[..., object], *arguments: object) -> Ref:
        if function is warm_up:
            self.ray.measuring += [self.node] * bool(arguments[1])
            return self._answer(self.ray.health.get(self.node, FIT), self.ray.start_s.get(self.node, 5.0))
        if function is let_go:
            return self._answer(self.ray.offers.get(self.node, True), self.ray.let_go_s.get(self.node, 0.1))
        if function is settle:
            self.ray.settled[self.node] = arguments[0]
            return self._answer(True, self.ray.settle_s.get(self.node, 0.1))
        if function is load_worker:
            return self._answer(None, 0.0)
        return self._answer(function(self.node), 0.1)  # the network, measured again


class FakeRay:
    """The functions of Ray that a pool calls, and its clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.start_s: dict[str, float] = {}
        """How long a process on a node takes to start; 5 s on others."""
        self.let_go_s: dict[str, float] = {}
        self.offers: dict[str, LiveShard] = {}
        """What a process on a node still has of its group's state, if anything."""
        self.settle_s: dict[str, float] = {}
        self.settled: dict[str, object] = {}
        """The ranks that hold the state, as each was told."""
        self.answer_s: dict[str, float] = {}
        self.health: dict[str, Any] = {}
        """What the check on a node finds, or the error that it ends with."""
        self.measuring: list[str] = []
        """The nodes of new processes that measure the network."""
        self.silent: set[str] = set()
        """Nodes that do not answer."""
        self.stopped_s: dict[str, float] = {}
        """Nodes whose processes say nothing from a time on."""
        self.started: list[Actor] = []
        self.killed: list[Actor] = []

    def metadata(self, actor: Actor) -> object:
        """As Ray's."""
        return SimpleNamespace(node_id=actor.node, node_ip=actor.node, pid=1, accelerator_ids={})

    def start(self, node: str, name: str = "") -> Any:
        """Start a process on a node, under a name."""
        self.started.append(Actor(self, node))
        return self.started[-1]

    def wait(self, refs: Sequence[Ref], num_returns: int = 1, timeout: float = math.inf) -> tuple[list[Ref], list[Ref]]:
        """As Ray's: the clock goes on until there are as many answers."""
        enough_s = sorted(ref.at_s for ref in refs)[num_returns - 1]
        self.now_s = max(self.now_s, min(enough_s, self.now_s + timeout))
        done = [ref for ref in refs if ref.at_s <= self.now_s]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: Ref, timeout: float = math.inf) -> object:
        """As Ray's."""
        if not self.wait([ref], 1, timeout)[0]:
            raise GetTimeoutError
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def put(self, value: object) -> Ref:
        """As Ray's."""
        return Ref(value, self.now_s)

    def kill(self, actor: Actor) -> None:
        """As Ray's."""
        actor.is_alive = False
        self.killed.append(actor)

    def silent_processes(self, actors: Mapping[Actor, str]) -> set[Actor]:
        """As ``liveness``'s."""
        return {actor for actor, node in actors.items() if self.stopped_s.get(node, math.inf) <= self.now_s}

    @property
    def alive(self) -> list[str]:
        """The nodes of processes that were not ended."""
        return sorted(actor.node for actor in self.started if actor.is_alive)


def faked(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Return the Ray that pools use from now on."""
    ray = FakeRay()
    monkeypatch.setattr(process_pool, "ray", ray)
    for module in (process_pool, liveness):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: ray.now_s))
    monkeypatch.setattr(liveness, "ray", ray)
    monkeypatch.setattr(liveness, "silent_processes", ray.silent_processes)
    monkeypatch.setattr(nodes, "unanswering", lambda names: set(names) & ray.silent)
    return ray
