"""Ranks in a group whose nodes are folders: some are lost at once, with the snapshots on them, and the others go on."""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import whole
from loops import feed

from springtide.checkpoint import leases
from springtide.checkpoint.piece_table import PieceTable
from springtide.checkpoint.snapshot_parts import Snapshot, SnapshotPart, file_of
from springtide.checkpoint.staging import StagingBuffer
from springtide.config import Config
from springtide.distributed import Connections, World, end_group
from springtide.distributed import world as world_of
from springtide.elastic import GroupRequest
from springtide.elastic.copies import LiveShard, newest_holders
from springtide.events import Event
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.training import GroupContext, TrainLoop
from springtide.training.live_state import LiveState

_WAIT_S = 60.0


class Lost(BaseException):
    """The node of this rank is gone."""


class Nodes:
    """A folder a node: the ``SnapshotStore`` of the rank there."""

    def __init__(self, root: Path, nodes: Sequence[int], here: int) -> None:
        """``nodes``: those of the group. A copy lies on the next one."""
        self._root, self._here = root, root / f"node-{here}"
        self._peer = root / f"node-{nodes[(nodes.index(here) + 1) % len(nodes)]}"
        self._held: dict[str, tuple[Snapshot, bytes]] = {}

    def keep(self, snapshot: Snapshot, stage: StagingBuffer, needed_from: int) -> int:
        for node in (self._here, self._peer):
            self._write(node, snapshot, stage)
        return 0

    def hold(self, snapshot: Snapshot, stage: StagingBuffer) -> None:
        self._write(self._here, snapshot, stage)

    def _write(self, node: Path, snapshot: Snapshot, stage: StagingBuffer) -> None:
        node.mkdir(parents=True, exist_ok=True)
        part = node / "part"
        part.write_bytes(pickle.dumps((snapshot, bytes(stage._bytes.numpy()))))
        part.rename(node / f"{file_of(snapshot.key)}.snapshot")

    def settled(self, handle: Any) -> bool:
        return True

    def staying(self) -> list[str]:
        return []

    def evacuate(self, stay: Sequence[str]) -> bool:
        return True

    def exclude(self, file: str) -> None:
        raise AssertionError(f"{file} has other bytes")

    def forget(self, before: int, kept: SnapshotPart | None = None) -> None:
        return None

    def found(self) -> list[SnapshotPart]:
        return [pickle.loads(part.read_bytes())[0].part for part in self._root.glob("node-*/*.snapshot")]

    def source(self, parts: Sequence[SnapshotPart]) -> Nodes:
        for name in map(file_of, (one.key for one in parts)):
            [path, *_] = self._root.glob(f"node-*/{name}.snapshot")
            self._held[name] = pickle.loads(path.read_bytes())
        return self

    def table(self, parts: Sequence[SnapshotPart]) -> PieceTable:
        tables = [self._held[file_of(part.key)][0].table for part in parts]
        return PieceTable.joined([PieceTable.of([]), *tables])

    def stream(self, name: str, begin: int, end: int) -> Iterator[memoryview]:
        yield memoryview(self._held[name][1])[begin:end]

    def size(self, name: str) -> int:
        return len(self._held[name][1])


def _loop(world: World, config: Config, nodes: Nodes) -> tuple[TrainLoop, LiveState]:
    store: Any = nodes
    folder = Folder(config.run.root) / config.run.id
    context = GroupContext(owner="a driver")
    run = TrainLoop(config, world, open_data(config.data), folder, snapshot_store=store, context=context)
    return run, LiveState(run.state, world, run.described, store, config.checkpoint.stage)


def _weights(run: TrainLoop) -> dict[str, torch.Tensor]:
    return {name: whole(one) for name, one in run.state.tensors().items()}


def train_through_a_loss(
    world: World, config: Config, root: str, lost: Sequence[int], lost_at: int
) -> tuple[list[Event], dict[str, torch.Tensor]]:
    """Train, and lose the nodes of the ranks ``lost`` at once while the others are in the step after ``lost_at``; none with an
    empty list. Returns the events of the last group, and its weights and optimizer state; of a lost rank, nothing."""
    place, rank, survivors = (
        Path(root) / config.run.id,
        world.rank,
        [one for one in range(world.size) if one not in lost],
    )
    links = Connections()
    if world.is_first:
        leases.claim(Folder(config.run.root) / config.run.id, "a driver", trains=False)
    dist.barrier()
    world = world_of("cpu", 0, config.parallel.shards)
    run, live = _loop(world, config, Nodes(place, range(world.size), rank))

    def interrupt() -> GroupRequest | None:
        if rank in lost and run.state.step == lost_at:
            raise Lost
        return None

    events: list[Event] = []
    try:
        events.extend(run.events(feed, interrupt, [live]))
        return events, _weights(run)
    except Lost:
        # as a node that is taken away: its processes end, and with them its memory
        links.cut()
        shutil.rmtree(place / f"node-{rank}")
        (place / f"gone-{rank}").touch()
        end_group(clean=True)
        _meet(place / "lost", 1, rank)
        return [], {}
    except RuntimeError:  # gloo's: a peer is lost
        live.freeze()
        offer = live.offer(survivors)
        links.cut()
        end_group(clean=True)
    _await([place / f"gone-{one}" for one in lost])
    assert offer is not None, "the step before was whole"
    (place / "offer").with_suffix(f".{rank}").write_bytes(pickle.dumps(tuple(offer)))
    told = [place / f"offer.{one}" for one in survivors]
    _await(told)
    holders = newest_holders([LiveShard(*pickle.loads(one.read_bytes())) for one in told])
    if rank in holders:
        live.deposit(holders)
    del run, live
    _meet(place / "survivors", len(survivors), survivors.index(rank))
    world = world_of("cpu", 0, config.parallel.shards)
    run, live = _loop(world, config, Nodes(place, survivors, rank))
    return list(run.events(feed, lambda: None, [live])), _weights(run)


def train_beside_a_twin(world: World, config: Config, root: str, lost: Sequence[int], lost_at: int) -> list[Any]:
    """Train a run that nothing happens to, and ``config`` as ``train_through_a_loss``; what that returns of both."""
    twin = train_through_a_loss(world, config.override({"run.id": "twin"}), root, [], 0)
    return [twin, train_through_a_loss(world, config, root, lost, lost_at)]


def _meet(place: Path, number: int, rank: int) -> None:
    """Join a new group; its members meet at a file, which is one's own for a group of one."""
    name = f"{place}-{rank}" if number == 1 else str(place)
    dist.init_process_group(
        "gloo", store=dist.FileStore(name, number), rank=0 if number == 1 else rank, world_size=number
    )
    dist.barrier()


def _await(files: Sequence[Path]) -> None:
    end_s = time.monotonic() + _WAIT_S
    while not all(one.exists() and (one.suffix == "" or one.stat().st_size) for one in files):
        assert time.monotonic() < end_s, f"{files} did not come"
        time.sleep(0.01)  # between looks
