"""What a group asks the store when it restores: each index once, one note. The ranks are threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from springtide.checkpoint import leases, restore
from springtide.checkpoint.commit import CommitJob, PieceWriter
from springtide.checkpoint.format import Meta, StagedPiece, checkpoints
from springtide.checkpoint.retention import Rule
from springtide.errors import CheckpointError
from springtide.storage import Folder

ROWS, WIDTH = 8, 4


class Group:
    """Ranks that are threads, in place of a process group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size, self.here, self.values = size, threading.local(), [None] * size
        self.barrier = threading.Barrier(size, timeout=60)
        monkeypatch.setattr(restore, "rank_here", lambda: self.here.rank)
        monkeypatch.setattr(restore, "gathered", self.gathered)
        monkeypatch.setattr(restore, "on_first", self.on_first)

    def gathered(self, value: Any) -> list[Any]:
        self.values[self.here.rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found

    def on_first(self, function: Callable[[], Any]) -> Any:
        return self.gathered(function() if self.here.rank == 0 else None)[0]

    def each(self, function: Callable[[], Any]) -> list[Any]:
        """What ``function`` returns on each rank."""

        def on(rank: int) -> Any:
            self.here.rank = rank
            return function()

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(on, range(self.size)))


def saved(run: Folder, ranks: int) -> None:
    """Save a model of one weight, of which each rank has some rows, as ``ranks`` ranks do."""
    term, rows = leases.claim(run, "me").term, ROWS // ranks
    meta = Meta(step=5, tokens=5, world_size=ranks, order_identity="o", config_fingerprint="c")
    for rank in reversed(range(ranks)):  # rank 0 commits
        piece = StagedPiece("model/weight", "F32", (ROWS, WIDTH), (rank * rows, 0), (rows, WIDTH), 0, 4 * rows * WIDTH)
        data = torch.arange(rank * rows * WIDTH, (rank + 1) * rows * WIDTH, dtype=torch.float32).numpy().tobytes()
        job = CommitJob(run.url, term, rank, meta, {}, [piece], Rule(9), "me")
        PieceWriter(run).write(job, lambda _, data=data: memoryview(data), lambda: False)


def restored(run: Folder) -> torch.Tensor:
    """What a rank restores, of a model that each rank has whole."""
    model = nn.Linear(WIDTH, ROWS, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    found = restore.restore(run, model, optimizer, lambda step: "o")
    assert found is not None
    assert found.meta.step == 5
    return model.weight.detach()


@pytest.mark.parametrize(("before", "now"), [(4, 2), (4, 4), (2, 8)])
def test_a_group_reads_each_index_once_and_leaves_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, now: int
) -> None:
    """Every rank read the indexes of all, and left a note of its own."""
    run, asked = Folder(tmp_path / "run"), Counter[str]()
    saved(run, before)
    read, write = Folder.read, Folder.write

    def counted_read(folder: Folder, name: str) -> bytes:
        asked[name] += 1
        return read(folder, name)

    def counted_write(folder: Folder, name: str, *rest: Any, **named: Any) -> None:
        asked[name.partition("/")[0]] += 1
        write(folder, name, *rest, **named)

    monkeypatch.setattr(Folder, "read", counted_read)
    monkeypatch.setattr(Folder, "write", counted_write)
    for weight in Group(monkeypatch, now).each(lambda: restored(run)):
        assert torch.equal(weight, torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH))
    assert {name: count for name, count in asked.items() if "-r0" in name} == {
        f"a0001-r{rank:04d}.json": 1 for rank in range(before)
    }
    assert asked["readers"] == 1
    assert not (checkpoints(run) / "readers").names()


def test_an_index_that_one_rank_finds_bad_is_bad_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Folder(tmp_path / "run")
    saved(run, 2)
    (checkpoints(run) / "step-0000000005").write("a0001-r0001.json", b"{}")

    def refused() -> str:
        with pytest.raises(CheckpointError) as error:
            restored(run)
        return str(error.value)

    for said in Group(monkeypatch, 4).each(refused):
        assert "a0001-r0001.json: digest expected" in said
        assert "(rank 1)" in said
