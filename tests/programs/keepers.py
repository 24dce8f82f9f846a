"""Ranks whose keepers of snapshots are their own, and one of them full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loops import feed

from springtide.checkpoint.snapshot_parts import Snapshot, SnapshotPart
from springtide.checkpoint.staging import StagingBuffer
from springtide.config import Config
from springtide.distributed import World
from springtide.events import record
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.training import TrainLoop


class Keeper:
    """Keeps nothing; from the second snapshot on there is no room, if it is ``full``."""

    def __init__(self, full: bool) -> None:
        self.full, self.taken = full, 0

    def keep(self, snapshot: Snapshot, stage: StagingBuffer, needed_from: int) -> int:
        self.taken += 1
        return self.taken

    def settled(self, handle: Any) -> bool:
        if self.full and handle == 2:
            raise OSError("snapshots would take 75 MiB of a node, checkpoint.memory_bytes allows 68 MiB")
        return True

    def hold(self, snapshot: Snapshot, stage: StagingBuffer) -> None:
        return None

    def staying(self) -> list[str]:
        return []

    def evacuate(self, stay: Sequence[str]) -> bool:
        return True

    def exclude(self, file: str) -> None:
        return None

    def forget(self, before: int, kept: SnapshotPart | None = None) -> None:
        return None

    def found(self) -> Sequence[SnapshotPart]:
        return []

    def source(self, parts: Sequence[SnapshotPart]) -> Any:
        raise OSError("nothing is kept")


def train_with_a_full_keeper(world: World, config: Config, full: int) -> tuple[list[dict[str, Any]], int]:
    """Train where rank ``full`` cannot keep its second snapshot; what was told here, and how many snapshots were taken."""
    keeper = Keeper(world.rank == full)
    run = TrainLoop(
        config, world, open_data(config.data), Folder(config.run.root) / config.run.id, snapshot_store=keeper
    )
    told = [record(event) for event in run.events(feed, lambda: None)]
    return told, keeper.taken
