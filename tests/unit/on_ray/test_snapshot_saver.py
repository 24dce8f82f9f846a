"""While no group trains, the holders of the newest snapshot commit it. Ray's calls are made at once, the rest is real."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.format import Meta, Snapshot, StagedPiece, committed
from springtide.checkpoint.inspect import inspect
from springtide.checkpoint.snapshot_commit import write_part
from springtide.config import Config
from springtide.events import Saved
from springtide.on_ray.train import snapshot_saver
from springtide.on_ray.train.snapshot_lookup import ServerContents
from springtide.on_ray.train.snapshot_saver import SnapshotSaver
from springtide.on_ray.train.worker import TrainJob
from springtide.store import Folder


class Waiting:
    """A run of two ranks whose group is gone; its state of step 7 is in the memory of two nodes."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config: Config = configs.recipes.tiny().override({"run.root": str(root), "run.id": "run"})
        self.run, self.posted, self.answers = Folder(root / "run"), list[Any](), dict[int, Any]()
        leases.claim(self.run, "driver", trains=False)
        self.term = leases.claim(self.run, "driver", again=True).term
        self.parts = [self.part(step, rank) for step in (6, 7) for rank in (0, 1)]
        mailbox: Any = SimpleNamespace(post=self.posted.extend)
        self.saver = SnapshotSaver(TrainJob(self.config, mailbox, {}, "driver"))
        monkeypatch.setattr(snapshot_saver, "servers_named", lambda name: [])
        monkeypatch.setattr(snapshot_saver, "contents_of", lambda servers: self.contents())
        monkeypatch.setattr(snapshot_saver, "staying", lambda: ["node1"])
        monkeypatch.setattr(snapshot_saver, "ray", SimpleNamespace(get=lambda calls: [call() for call in calls]))

    def part(self, step: int, rank: int) -> Snapshot:
        meta = Meta(
            step=step,
            tokens=step,
            world_size=2,
            order_identity="o",
            config_fingerprint=configs.fingerprint(self.config),
        )
        piece = StagedPiece("model/w", "U8", (8,), (4 * rank,), (4,), 0, 4)
        return Snapshot(self.term, rank, meta, (piece,), 4)

    def contents(self) -> list[ServerContents]:
        """Rank 1's part lies on the first node, too."""
        held = {"node0": self.parts, "node1": [part for part in self.parts if part.rank == 1]}
        return [
            ServerContents((node, 1), [(part, 0) for part in parts], self.server(node)) for node, parts in held.items()
        ]

    def server(self, node: str) -> Any:
        def save(job: Any, key: Any, tries: int) -> Any:
            assert node == ("node1" if job.rank else "node0"), "a copy on a node that stays is preferred"
            part = memoryview(bytes([key[1]] * 4))
            return lambda: self.answers.get(job.rank) or write_part(job, part, 1)

        return SimpleNamespace(save=SimpleNamespace(remote=save))

    def save(self) -> str:
        return self.saver.finish(lambda: False)


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    found = Waiting(tmp_path, monkeypatch)
    real_get = snapshot_saver.ray.get
    # the writer of rank 0 waits for the others' parts: they are written first here
    monkeypatch.setattr(snapshot_saver.ray, "get", lambda calls: list(reversed(real_get(calls[::-1]))))
    return found


def test_the_newest_snapshot_is_committed_under_a_lease_of_its_own(waiting: Waiting) -> None:
    assert waiting.save() == ""
    [one] = inspect(waiting.run, verify=True)
    assert (one.name, one.state) == ("step-0000000007", "committed")
    assert one.manifest
    assert one.manifest.term == waiting.term + 1
    [saved] = waiting.posted
    assert isinstance(saved, Saved)
    assert (saved.step, saved.size_bytes) == (7, 8)
    assert waiting.save() == ""
    assert leases.newest(waiting.run).term == waiting.term + 1  # type: ignore[union-attr]  # once
    # the driver still holds the run, and its next group may claim it
    assert leases.claim(waiting.run, "driver", again=True).driver == 1


@pytest.mark.parametrize("why", ["as new", "another config", "went back", "begun again", "torn", "a group starts"])
def test_what_must_not_or_need_not_be_committed_is_not(waiting: Waiting, why: str) -> None:
    before = []
    if why == "as new":
        assert waiting.save() == ""
        before = ["step-0000000007"]
        waiting.saver.cancel()
    elif why == "another config":
        waiting.saver._job = TrainJob(
            waiting.config.override({"stream.seed": 99}), waiting.saver._job.mailbox, {}, "driver"
        )
    elif why == "went back":
        leases.note_rollback(waiting.run, waiting.term + 1)
    elif why == "begun again":
        leases.note_scratch(waiting.run, waiting.term + 1)
    elif why == "torn":
        waiting.parts = [part for part in waiting.parts if part.rank == 0]
    term = leases.newest(waiting.run).term  # type: ignore[union-attr]
    if why == "a group starts":
        waiting.contents = lambda contents=waiting.contents: (waiting.saver.cancel(), contents())[1]  # type: ignore[misc]
    assert waiting.save() == ""
    assert committed(waiting.run) == before
    assert leases.newest(waiting.run).term == term  # type: ignore[union-attr]


def test_a_save_that_fails_is_said_and_tried_again(waiting: Waiting) -> None:
    waiting.answers[1] = OSError("503 Slow Down")
    waiting.answers[0] = OSError("not every part")
    assert "not every part" in waiting.save()
    assert committed(waiting.run) == []
    waiting.answers.clear()
    waiting.saver.begin()  # a moment ago: not yet
    assert not waiting.saver._is_busy
    assert waiting.save() == ""  # the run is to stop: at once
    assert committed(waiting.run) == ["step-0000000007"]


def test_a_newer_lease_refuses_what_is_under_way(waiting: Waiting) -> None:
    real_get = snapshot_saver.ray.get
    snapshot_saver.ray.get = lambda calls: (leases.claim(waiting.run, "driver", again=True), real_get(calls))[1]
    assert waiting.save() == ""
    assert committed(waiting.run) == []
