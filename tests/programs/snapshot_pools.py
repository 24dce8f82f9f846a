"""Snapshot servers in this process, each with pools of threads as Ray gives them: one for each concurrency group."""

from __future__ import annotations

import concurrent.futures as futures
import math
import os
import types
from collections.abc import Sequence
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from springtide import config as configs
from springtide.checkpoint.format import Meta, StagedPiece
from springtide.checkpoint.snapshot_parts import Snapshot
from springtide.checkpoint.staging import StagingBuffer
from springtide.ray.cluster import liveness
from springtide.ray.train import snapshot_client, snapshot_server
from springtide.ray.train.snapshot_client import SnapshotClient
from springtide.ray.train.snapshot_lookup import ServerContents
from springtide.ray.train.snapshot_server import SnapshotServer
from springtide.storage import Folder, digest

WAIT_S = 30.0


class Handle:
    """What Ray gives for an actor."""

    def __init__(self, node: str, threads: int = 2, limit_bytes: int = 2**30) -> None:
        """``threads``: in each group."""
        self.node, self.server = node, SnapshotServer("/dev/shm", limit_bytes, math.inf)
        self._threads, self._pools = threads, dict[str, futures.ThreadPoolExecutor]()
        self.is_dead, self.hangs = False, set[str]()
        """Methods that never answer."""
        self.is_stopped = False
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return types.SimpleNamespace(remote=lambda *arguments: self._call(name, arguments))

    def _call(self, name: str, arguments: Sequence[Any]) -> futures.Future[Any]:
        self.calls.append(name)
        if self.is_dead:
            dead: futures.Future[Any] = futures.Future()
            dead.set_exception(ActorDiedError())
            return dead
        if name in self.hangs:
            return futures.Future()
        method = getattr(self.server, name)
        group = getattr(method, "__ray_concurrency_group__", "ask")
        pool = self._pools.setdefault(group, futures.ThreadPoolExecutor(self._threads))
        return pool.submit(method, *arguments)


class PooledRay:
    """The functions of Ray that servers and their clients call."""

    exceptions = ray.exceptions
    method = staticmethod(ray.method)
    ObjectRef = ray.ObjectRef

    def __init__(self) -> None:
        self.handles: dict[str, Handle] = {}
        self.node = ""

    def put(self, value: Any) -> Any:
        return value

    def wait(self, refs: list[Any], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        done, late = futures.wait(refs, timeout)
        return list(done), list(late)

    def get(self, ref: Any, timeout: float | None = WAIT_S) -> Any:
        """As Ray's: an error of the actor's comes wrapped."""
        try:
            return ref.result(timeout)
        except futures.TimeoutError:
            raise GetTimeoutError from None
        except (OSError, ValueError) as error:
            raise RayTaskError("call", "trace", error).as_instanceof_cause() from None

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_node_id=lambda: self.node)

    def get_actor(self, name: str, namespace: str) -> Handle:
        return self.handles[name.rpartition("-")[2]]


class Nodes:
    """Nodes with a server each, and a rank's client on each."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        names: str,
        run: Folder,
        copies: int = 1,
        zones: str = "",
        group: str = "",
        **of_server: Any,
    ) -> None:
        """``zones``: a letter for each node; ``group``: the nodes with ranks, if not all."""
        self.ray = PooledRay()
        self.domains = {name: (zone,) for name, zone in zip(names, zones or " " * len(names), strict=True)}
        self.ray.handles = {name: Handle(name, **of_server) for name in names}
        monkeypatch.setattr(snapshot_server, "ray", self.ray)
        monkeypatch.setattr(snapshot_client, "ray", self.ray)
        monkeypatch.setattr(liveness, "ray", self.ray)
        monkeypatch.setattr(liveness, "silent_processes", lambda servers: {one for one in servers if one.is_stopped})
        for name in ("staying", "accepting"):
            monkeypatch.setattr(snapshot_client, name, lambda with_room=False: list(self.ray.handles))
        monkeypatch.setattr(snapshot_client, "domains_of", lambda nodes: {node: self.domains[node] for node in nodes})
        monkeypatch.setattr(SnapshotClient, "_server", lambda client, node: self.ray.handles[node])
        monkeypatch.setattr(snapshot_client, "servers_named", lambda prefix: list(self.ray.handles.values()))
        monkeypatch.setattr(snapshot_client, "contents_of", self._contents)
        config = configs.recipes.tiny().override({"checkpoint.memory_copies": copies})
        self.clients = {}
        group = group or names
        for name in group:
            self.ray.node = name
            self.clients[name] = SnapshotClient(config, run, None)  # type: ignore[arg-type]  # nobody follows it
            self.clients[name].pair(list(group), [self.domains[one] for one in group])
        self.asked = 0

    def _contents(self, handles: list[Handle]) -> list[ServerContents]:
        """As ``snapshot_lookup.contents_of``."""
        self.asked += 1
        return [
            ServerContents(
                (handle.node, os.getpid()),
                [(held.snapshot.part, held.fd) for held in handle.server._held.values() if held.is_whole],
                handle,  # type: ignore[arg-type]  # as Ray's
            )
            for handle in handles
            if not handle.is_dead
        ]

    def whole(self, step: int) -> str:
        """The nodes that hold a whole part of ``step``."""
        return "".join(
            name
            for name, handle in self.ray.handles.items()
            if any(one.is_whole and one.snapshot.meta.step == step for one in handle.server._held.values())
        )

    def close(self) -> None:
        for handle in self.ray.handles.values():
            handle.server.forget(10**9)


def taken(step: int, data: bytes, rank: int = 0, world_size: int = 1) -> tuple[Snapshot, StagingBuffer]:
    """A rank's part of a snapshot, and the memory that has it."""
    stage = StagingBuffer("/dev/shm", len(data))
    stage._bytes.numpy()[:] = list(data)
    group = b"g" * 16
    stage.mark(step, group)
    meta = Meta(step=step, tokens=step, world_size=world_size, order_identity="o", config_fingerprint="c")
    piece = StagedPiece("model/weight", "U8", (len(data),), (0,), (len(data),), 0, len(data))
    digests = ((digest.of_bytes(data),),)
    return Snapshot.of(1, rank, meta, (piece,), len(data), digests, group, step % 2), stage
