"""What a rank tells its keeper of older leases: when their snapshots are still needed, and when they only take room."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from springtide.checkpoint import leases
from springtide.checkpoint.format import Meta
from springtide.checkpoint.piece_table import PieceTable
from springtide.checkpoint.snapshot_parts import Snapshot, SnapshotPart, file_of, newest_whole
from springtide.checkpoint.snapshots import Snapshotter, hold_live, restore_from_snapshots
from springtide.checkpoint.staging import StagingBuffer
from springtide.checkpoint.tensors import named_tensors
from springtide.storage import Folder


class Here:
    """A keeper in this process."""

    def __init__(self) -> None:
        self.kept: list[tuple[Snapshot, StagingBuffer, int]] = []
        self.forgot: list[tuple[int, tuple[int, int] | None]] = []
        self.has_forgotten = threading.Event()

    def keep(self, snapshot: Snapshot, stage: StagingBuffer, needed_from: int) -> int:
        self.kept.append((snapshot, stage, needed_from))
        return len(self.kept)

    def settled(self, handle: Any) -> bool:
        return True

    def hold(self, snapshot: Snapshot, stage: StagingBuffer) -> None:
        """Keeps a copy: the stage is closed then."""
        copy = StagingBuffer("/dev/shm", snapshot.size_bytes)
        copy._bytes.copy_(stage._bytes)
        self.kept.append((snapshot, copy, 0))

    def staying(self) -> list[str]:
        return []

    def evacuate(self, stay: Sequence[str]) -> bool:
        return True

    def exclude(self, file: str) -> None:
        return None

    def forget(self, before: int, kept: SnapshotPart | None = None) -> None:
        self.forgot.append((before, kept and kept.key[:2]))
        self.has_forgotten.set()

    def found(self) -> list[SnapshotPart]:
        return [snapshot.part for snapshot, _, _ in self.kept]

    def source(self, parts: Sequence[SnapshotPart]) -> Here:
        return self

    def table(self, parts: Sequence[SnapshotPart]) -> PieceTable:
        held = {snapshot.key: snapshot.table for snapshot, _, _ in self.kept}
        for part in parts:
            part.check(held[part.key])
        return PieceTable.joined([held[part.key] for part in parts])

    def stream(self, name: str, begin: int, end: int) -> Any:
        [stage] = [stage for snapshot, stage, _ in self.kept if file_of(snapshot.key) == name]
        yield memoryview(stage._bytes.numpy())[begin:end]

    def size(self, name: str) -> int:
        return next(snapshot.size_bytes for snapshot, _, _ in self.kept if file_of(snapshot.key) == name)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def meta(step: int) -> Meta:
    return Meta(step=step, tokens=step, world_size=1, order_identity="o", config_fingerprint="c")


def take(memory: Snapshotter, state: tuple[nn.Module, torch.optim.Optimizer], step: int) -> None:
    memory.begin(named_tensors(*state), meta(step))
    memory.staged()
    while memory.busy():
        time.sleep(0.001)  # between looks


def test_older_attempts_are_needed_until_a_snapshot_of_this_one_is_safe(tmp_path: Any) -> None:
    keeper, state = Here(), trained()
    memory = Snapshotter(keeper, term=3, rank=0, world_size=1, stage_in="/dev/shm")
    for step in (1, 2, 3):
        take(memory, state, step)
    assert [needed_from for _, _, needed_from in keeper.kept] == [0, 3, 3]
    assert keeper.has_forgotten.wait(30)  # in a thread: no step waits for all nodes
    assert keeper.forgot == [(3, None)]
    memory.close()


def test_when_all_have_restored_a_snapshot_it_alone_is_kept(tmp_path: Any) -> None:
    keeper, state, fresh = Here(), trained(), trained()
    memory = Snapshotter(keeper, term=3, rank=0, world_size=1, stage_in="/dev/shm")
    take(memory, state, 7)
    run = Folder(str(tmp_path))
    found = restore_from_snapshots(run, keeper, *fresh, lambda step: "o")
    assert found is not None
    assert found.meta.step == 7
    assert all(map(torch.equal, fresh[0].parameters(), state[0].parameters()))
    assert keeper.forgot == [(4, (3, 7))]
    memory.close()


def test_after_going_back_older_leases_count_until_that_step_only(tmp_path: Any) -> None:
    """Their order is that of the newer ones, so nothing else tells them apart."""
    keeper, state, run = Here(), trained(), Folder(tmp_path)
    before = Snapshotter(keeper, term=2, rank=0, world_size=1, stage_in="/dev/shm")
    take(before, state, 5)
    take(before, state, 9)
    leases.note_gone_back(run, 3, 5)
    found = restore_from_snapshots(run, keeper, *trained(), lambda step: "o")
    assert found is not None
    assert found.meta.step == 5
    after = Snapshotter(keeper, term=4, rank=0, world_size=1, stage_in="/dev/shm")
    take(after, state, 7)
    found = restore_from_snapshots(run, keeper, *trained(), lambda step: "o")
    assert found is not None
    assert found.meta.step == 7
    for memory in (before, after):
        memory.close()


def test_a_rank_that_is_cut_off_while_it_copies_marks_nothing_whole() -> None:
    """What was copied may be what an aborted collective left in the weights."""
    keeper, cut = Here(), [False]
    memory = Snapshotter(keeper, 1, 0, 1, "/dev/shm", lambda: cut[0])
    take(memory, trained(), 1)
    cut[0] = True
    take(memory, trained(), 2)
    assert [snapshot.meta.step for snapshot, _, _ in keeper.kept] == [1]
    assert int.from_bytes(memory._stages[1]._map[:8], "little", signed=True) == -1
    memory.close()


def test_a_snapshot_from_before_a_rollback_is_not_loaded(tmp_path: Any) -> None:
    """A device may have spoilt it: the group that follows the rollback may be lost at its first step."""
    keeper, state, run = Here(), trained(), Folder(str(tmp_path))
    memory = Snapshotter(keeper, term=3, rank=0, world_size=1, stage_in="/dev/shm")
    take(memory, state, 7)
    leases.note_rollback(run, 4)
    assert restore_from_snapshots(run, keeper, *trained(), lambda step: "o") is None
    later = Snapshotter(keeper, term=4, rank=0, world_size=1, stage_in="/dev/shm")
    take(later, state, 5)
    found = restore_from_snapshots(run, keeper, *trained(), lambda step: "o")
    assert found is not None
    assert found.meta.step == 5
    memory.close()
    later.close()


def test_a_copy_with_other_bytes_is_read_elsewhere_and_without_another_the_store_is(tmp_path: Any) -> None:
    keeper, state, excluded = Here(), trained(), list[str]()
    memory = Snapshotter(keeper, term=3, rank=0, world_size=1, stage_in="/dev/shm")
    take(memory, state, 7)
    keeper.exclude = excluded.append  # type: ignore[method-assign]
    memory._stages[0]._bytes[3] ^= 1
    assert restore_from_snapshots(Folder(str(tmp_path)), keeper, *trained(), lambda step: "o") is None
    assert excluded == ["3-7-0"] * 3
    memory.close()


def test_pieces_that_are_not_those_of_the_rank_are_asked_for_elsewhere(tmp_path: Any) -> None:
    keeper, state, excluded = Here(), trained(), list[str]()
    memory = Snapshotter(keeper, term=3, rank=0, world_size=1, stage_in="/dev/shm")
    take(memory, state, 7)
    keeper.exclude = excluded.append  # type: ignore[method-assign]
    keeper.kept[0][0].table.boxes[0] += 1
    assert restore_from_snapshots(Folder(str(tmp_path)), keeper, *trained(), lambda step: "o") is None
    assert excluded == ["3-7-0"] * 3
    memory.close()


def test_survivors_of_a_lost_group_hold_its_state_in_as_many_parts_as_they_are(tmp_path: Any) -> None:
    """Of four ranks with a copy each, the first and the last are left; what they hold is newer than the last snapshot."""
    keeper, state, fresh = Here(), trained(), trained()
    memory = Snapshotter(keeper, term=3, rank=0, world_size=1, stage_in="/dev/shm")
    take(memory, state, 7)
    later = trained()
    whole = meta(8).model_copy(update={"world_size": 4})
    for rank in (0, 3):
        hold_live(keeper, named_tensors(*later), whole, 3, rank, [0, 3], "/dev/shm")
    parts = [snapshot for snapshot, _, _ in keeper.kept if snapshot.num_survivors]
    names = [piece.tensor for part in parts for piece in part.pieces]
    assert sorted(names) == sorted(named_tensors(*later))  # each once
    assert [(part.rank, part.meta.world_size, file_of(part.key)) for part in parts] == [
        (0, 2, "3-8-0-of-2"),
        (1, 2, "3-8-1-of-2"),
    ]
    found = restore_from_snapshots(Folder(str(tmp_path)), keeper, *fresh, lambda step: "o")
    assert found is not None
    assert (found.meta.step, found.name) == (8, "live copy of step 8")
    assert all(map(torch.equal, fresh[0].parameters(), later[0].parameters()))
    memory.close()


def test_a_part_of_survivors_that_is_missing_makes_their_step_no_snapshot(tmp_path: Any) -> None:
    keeper, state = Here(), trained()
    memory = Snapshotter(keeper, term=3, rank=0, world_size=1, stage_in="/dev/shm")
    take(memory, state, 7)
    hold_live(keeper, named_tensors(*state), meta(8), 3, 0, [0, 1], "/dev/shm")
    hold_live(keeper, named_tensors(*state), meta(8), 2, 1, [0, 1], "/dev/shm")  # of another lease
    take(memory, state, 6)
    assert [part.key for part in newest_whole(keeper.found())] == [(3, 7, 0, 0)]
    take(memory, state, 8)
    hold_live(keeper, named_tensors(*state), meta(8), 3, 1, [0, 1], "/dev/shm")
    assert [part.key for part in newest_whole(keeper.found())] == [(3, 8, 0, 0)]  # it has copies
    memory.close()


def test_one_rank_alone_tells_all_nodes_what_is_not_needed_any_more() -> None:
    keeper, state = Here(), trained()
    memory = Snapshotter(keeper, 3, 1, 1, "/dev/shm")
    for step in (1, 2, 3):
        take(memory, state, step)
    assert keeper.forgot == []
    memory.close()
