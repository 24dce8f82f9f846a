"""While no group trains, the holders of the newest snapshot commit it. Ray's calls are made at once, the rest is real."""

from __future__ import annotations

import functools
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.format import Meta, StagedPiece, committed
from springtide.checkpoint.inspect import inspect
from springtide.checkpoint.snapshot_commit import write_part
from springtide.checkpoint.snapshot_parts import Snapshot
from springtide.config import Config
from springtide.errors import RunExists
from springtide.events import Saved
from springtide.ray.cluster import liveness
from springtide.ray.train import snapshot_saver
from springtide.ray.train.job import TrainJob
from springtide.ray.train.snapshot_lookup import ServerContents
from springtide.ray.train.snapshot_saver import OrphanedRun, SnapshotSaver
from springtide.storage import Folder, digest


class Waiting:
    """A run of two ranks whose group is gone; its state of step 7 is in the memory of two nodes."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config: Config = configs.recipes.tiny().override({"run.root": str(root), "run.id": "run"})
        self.run, self.posted, self.answers = Folder(root / "run"), list[Any](), dict[int, Any]()
        self.asked: list[tuple[str, int]] = []
        self.servers = ["node0", "node1"]
        self.rotten: set[tuple[str, int, int]] = set()
        """Node, step and rank of copies whose bytes have changed."""
        self.silent = False
        self.stopped: set[str] = set()
        """Nodes whose snapshot servers do not answer."""
        leases.claim(self.run, "driver", trains=False)
        self.term = leases.claim(self.run, "driver", again=True).term
        self.parts = [self.part(step, rank) for step in (6, 7) for rank in (0, 1)]
        mailbox: Any = SimpleNamespace(post=self.posted.extend)
        self.saver = SnapshotSaver(TrainJob(self.config, mailbox, {}, "driver"))
        monkeypatch.setattr(snapshot_saver, "servers_named", lambda name: self.servers)
        monkeypatch.setattr(snapshot_saver, "contents_of", lambda servers: self.contents())
        monkeypatch.setattr(snapshot_saver, "staying", lambda: ["node1"])
        monkeypatch.setattr(snapshot_saver, "ray", SimpleNamespace(get=self.get, wait=self.wait))

    def part(self, step: int, rank: int) -> Snapshot:
        meta = Meta(
            step=step,
            tokens=step,
            world_size=2,
            order_identity="o",
            config_fingerprint=configs.fingerprint(self.config),
        )
        piece = StagedPiece("model/w", "U8", (8,), (4 * rank,), (4,), 0, 4)
        digests = ((digest.of_bytes(bytes([step] * 4)),),)
        return Snapshot.of(self.term, rank, meta, (piece,), 4, digests)

    def contents(self) -> list[ServerContents]:
        """Rank 1's part lies on the first node, too."""
        held = {"node0": self.parts, "node1": [part for part in self.parts if part.rank == 1]}
        return [
            ServerContents((node, 1), [(held.part, 0) for held in parts], self.server(node))
            for node, parts in held.items()
            if node not in self.stopped
        ]

    def server(self, node: str) -> Any:
        def save(job: Any, key: Any, tries: int) -> Any:
            self.asked.append((node, job.rank))
            [held] = [part for part in self.parts if part.key == key]
            data = memoryview(bytes([99 if (node, *key[1:3]) in self.rotten else key[1]] * 4))
            return functools.cache(lambda: self.answers.get(job.rank) or write_part(job, held, data, 1))

        return type("Server", (), {"save": SimpleNamespace(remote=save)})()

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        """The part of the last rank is there first: the holder of rank 0's waits for the others."""
        return ([], calls) if self.silent else (calls[-1:], calls[:-1])

    def get(self, calls: list[Any]) -> list[Any]:
        return [call() for call in calls]

    def save(self) -> str:
        return self.saver.finish(lambda: False)


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    return Waiting(tmp_path, monkeypatch)


def test_the_newest_snapshot_is_committed_under_a_lease_of_its_own(waiting: Waiting) -> None:
    assert waiting.save() == ""
    assert waiting.asked == [("node0", 0), ("node1", 1)], "a copy on a node that stays is preferred"
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


def test_a_state_that_a_stopped_server_may_hold_is_looked_for_again(waiting: Waiting) -> None:
    waiting.stopped = {"node0"}
    assert "1 snapshot servers do not answer" in waiting.save()
    assert not waiting.saver.is_safe
    waiting.stopped = set()
    assert waiting.save() == ""
    assert (waiting.saver.is_safe, committed(waiting.run)) == (True, ["step-0000000007"])


def test_an_older_state_is_saved_while_a_newer_one_is_not_whole(waiting: Waiting) -> None:
    """Of step 8 one part is known; who holds the other one is stopped."""
    newer = [waiting.part(8, rank) for rank in (0, 1)]
    waiting.parts.append(newer[1])
    contents = waiting.contents

    def without_node2() -> list[ServerContents]:
        return contents() + [one for one in [node2] if "node2" not in waiting.stopped]

    node2 = ServerContents(("node2", 1), [(newer[0].part, 0)], waiting.server("node2"))
    waiting.servers.append("node2")
    waiting.contents, waiting.stopped = without_node2, {"node2"}  # type: ignore[method-assign]
    assert "1 snapshot servers do not answer" in waiting.save()
    assert (waiting.saver.is_safe, committed(waiting.run)) == (False, ["step-0000000007"])
    waiting.stopped = set()
    waiting.parts.append(newer[0])
    assert waiting.save() == ""
    assert waiting.saver.is_safe
    assert committed(waiting.run) == ["step-0000000007", "step-0000000008"]


@pytest.mark.parametrize("when", ["before it claims", "when it is done"])
def test_an_overtaken_save_does_not_replace_the_next_one(waiting: Waiting, when: str) -> None:
    """A save that a group has overtaken does not stand for the next one.

    The group trains on from memory and is lost in its turn: what it had reached must be saved."""
    contents, post, newer = waiting.contents, waiting.saver._job.mailbox.post, [waiting.part(8, 0), waiting.part(8, 1)]
    if when == "before it claims":
        waiting.contents = lambda: (waiting.saver.cancel(), contents())[1]  # type: ignore[method-assign]
    else:
        waiting.saver._job.mailbox.post = lambda events: (waiting.saver.cancel(), post(events))
    assert waiting.save() == ""
    assert not waiting.saver.is_safe
    waiting.contents, waiting.saver._job.mailbox.post = contents, post  # type: ignore[method-assign]
    waiting.parts += newer
    assert waiting.save() == ""
    assert waiting.saver.is_safe
    assert committed(waiting.run)[-1] == "step-0000000008"


def test_a_save_that_hangs_does_not_block_later_ones(waiting: Waiting) -> None:
    """A save that hangs when a group starts holds up no later one."""
    began, goes_on, real_wait = threading.Event(), threading.Event(), waiting.wait

    def wait(calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        if not began.is_set():
            began.set()
            assert goes_on.wait(60)
            return [], calls
        return real_wait(calls, num_returns, timeout)

    snapshot_saver.ray.wait = wait
    waiting.saver.begin()
    overtaken = waiting.saver._thread
    assert overtaken
    assert began.wait(60)
    waiting.saver.cancel()
    assert waiting.save() == ""
    assert waiting.saver.is_safe
    assert committed(waiting.run) == ["step-0000000007"]
    goes_on.set()
    overtaken.join(60)
    assert waiting.saver.is_safe, "what the one before says then does not count"


def test_a_save_that_fails_is_said_and_tried_again(waiting: Waiting) -> None:
    waiting.answers[1] = OSError("503 Slow Down")
    assert "503 Slow Down" in waiting.save()
    assert committed(waiting.run) == []
    waiting.answers.clear()
    waiting.saver.begin()  # a moment ago: not yet
    assert not waiting.saver._is_busy
    assert waiting.save() == ""  # the run is to stop: at once
    assert committed(waiting.run) == ["step-0000000007"]


def test_a_newer_lease_refuses_what_is_under_way(waiting: Waiting) -> None:
    real_wait = waiting.wait
    snapshot_saver.ray.wait = lambda *rest, **how: (
        leases.claim(waiting.run, "driver", again=True),
        real_wait(*rest, **how),
    )[1]
    assert waiting.save() == ""
    assert committed(waiting.run) == []


def test_a_changed_copy_is_replaced_by_another_one(waiting: Waiting, caplog: pytest.LogCaptureFixture) -> None:
    """A copy whose bytes have changed is not committed and another one is."""
    waiting.rotten.add(("node1", 7, 1))
    assert waiting.save() == ""
    assert waiting.asked == [("node0", 0), ("node1", 1), ("node0", 0), ("node0", 1)]
    [one] = inspect(waiting.run, verify=True)
    assert (one.name, one.state) == ("step-0000000007", "committed")
    assert "digest expected" in caplog.text


def test_a_copy_whose_pieces_have_changed_is_not_committed(waiting: Waiting) -> None:
    for part in waiting.parts:
        if part.meta.step == 7:
            part.table.boxes[0] += 1
    assert waiting.save() == ""
    assert committed(waiting.run) == ["step-0000000006"]


def test_without_a_good_newest_copy_the_previous_step_is_committed(waiting: Waiting) -> None:
    """Where every copy of the newest is bad the one before is committed."""
    waiting.rotten |= {("node0", 7, 1), ("node1", 7, 1)}
    assert waiting.save() == ""
    assert committed(waiting.run) == ["step-0000000006"]


def test_servers_that_do_not_answer_are_not_waited_for_for_ever(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting.silent = True
    monkeypatch.setattr(liveness.Liveness, "gone", lambda liveness, waited_for: set(waited_for))
    assert "stopped" in waiting.save()
    monkeypatch.setattr(liveness.Liveness, "gone", lambda liveness, waited_for: set())
    monkeypatch.setattr(snapshot_saver, "_WRITE_S", 0.05)
    assert "2 snapshot servers" in waiting.save()


def test_a_driver_learns_that_another_one_has_claimed_the_run(waiting: Waiting) -> None:
    leases.claim(waiting.run, "another driver", trains=False)
    waiting.save()
    assert isinstance(waiting.saver.refused, RunExists)
    assert committed(waiting.run) == []


def test_servers_that_were_faster_do_not_end_the_driver(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = leases.claim

    def slow(run: Folder, owner: str, **how: Any) -> leases.Lease:
        claim(run, owner, **how)
        raise RunExists("claimed at the same moment")

    monkeypatch.setattr(leases, "claim", slow)
    waiting.save()
    assert waiting.saver.refused is None
    assert not waiting.saver.is_safe


def alone(waiting: Waiting, node: str, driver_is_back: bool = False) -> None:
    """What the server of ``node`` does when the driver of the run has been gone."""
    orphaned = pickle.loads(pickle.dumps(OrphanedRun(waiting.config, waiting.run.url, "driver")))
    orphaned.commit((node, 1), lambda: driver_is_back)


def test_servers_whose_driver_was_killed_commit_what_they_hold(waiting: Waiting) -> None:
    alone(waiting, "node0")
    [one] = inspect(waiting.run, verify=True)
    assert (one.name, one.state) == ("step-0000000007", "committed")
    asked = list(waiting.asked)
    alone(waiting, "node1")  # there is nothing left to do
    assert waiting.asked == asked
    # a driver that resumes is not refused, although the process that claimed is alive
    assert leases.claim(waiting.run, "another driver", trains=False).term == waiting.term + 2


def test_one_server_claims_and_the_others_keep_their_parts(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """One server claims and the others hold their parts until the checkpoint is there."""
    looks = list[float]()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            alone(waiting, "node0")

    monkeypatch.setattr(snapshot_saver, "time", SimpleNamespace(monotonic=lambda: sum(looks), sleep=sleep))
    alone(waiting, "node1")
    assert len(looks) == 3
    assert committed(waiting.run) == ["step-0000000007"]
    assert leases.newest(waiting.run).term == waiting.term + 1  # type: ignore[union-attr]


def test_a_server_waits_for_busy_servers_and_polls_seldom(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server does not end because others have not answered and many look seldom."""
    looks, parts = list[float](), waiting.parts

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            waiting.parts = parts

    waiting.parts = [part for part in parts if part.rank == 0]  # nothing whole: a server is busy, not lost
    monkeypatch.setattr(snapshot_saver, "servers_named", lambda name: ["server"] * 100)
    monkeypatch.setattr(snapshot_saver, "time", SimpleNamespace(monotonic=lambda: sum(looks), sleep=sleep))
    alone(waiting, "node0", driver_is_back=False)
    assert committed(waiting.run) == ["step-0000000007"]
    assert looks[:2] == [5.0, 5.0]


def test_servers_whose_store_is_away_try_for_a_while(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(
        snapshot_saver, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    )
    waiting.answers = {0: OSError("503 Slow Down"), 1: OSError("503 Slow Down")}
    alone(waiting, "node0")
    assert committed(waiting.run) == []
    assert 600.0 <= now[0] < 700.0


@pytest.mark.parametrize("why", ["another driver has claimed", "a driver is back"])
def test_servers_of_a_run_that_somebody_has_again_write_nothing(waiting: Waiting, why: str) -> None:
    if why == "another driver has claimed":
        leases.end(waiting.run, waiting.term)
        leases.claim(waiting.run, "another driver", trains=False)
    before = sorted(waiting.run.names() + (waiting.run / "leases").names())
    alone(waiting, "node0", driver_is_back=why == "a driver is back")
    assert sorted(waiting.run.names() + (waiting.run / "leases").names()) == before
    assert waiting.asked == []


def test_servers_save_their_state_after_a_second_driver_has_ended(waiting: Waiting) -> None:
    second = leases.claim(waiting.run, "another driver", trains=False)
    alone(waiting, "node0")
    assert committed(waiting.run) == []
    leases.end(waiting.run, second.term)
    alone(waiting, "node0")
    assert committed(waiting.run) == ["step-0000000007"]


def test_servers_leave_a_run_that_a_second_driver_has_trained(waiting: Waiting) -> None:
    second = leases.claim(waiting.run, "another driver", trains=False)
    group = leases.claim(waiting.run, "another driver", again=True)
    for one in (group, second):
        leases.end(waiting.run, one.term)
    alone(waiting, "node0")
    assert committed(waiting.run) == []
    assert leases.newest(waiting.run) == group


def test_servers_take_no_run_that_a_driver_claims_meanwhile(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[float]()

    def meanwhile() -> list[str]:
        with monkeypatch.context() as other_host:
            other_host.setattr(leases.socket, "gethostname", lambda: "another host")
            leases.claim(waiting.run, "another driver", trains=False, again=False)
        return ["node1"]

    monkeypatch.setattr(snapshot_saver, "staying", meanwhile)
    monkeypatch.setattr(snapshot_saver, "time", SimpleNamespace(monotonic=lambda: sum(looks), sleep=looks.append))
    alone(waiting, "node0")
    assert committed(waiting.run) == []
    assert leases.newest(waiting.run).owner == "another driver"  # type: ignore[union-attr]


def test_servers_keep_the_trust_that_the_last_driver_was_given(waiting: Waiting) -> None:
    sources = {"model.source": "json:loads"}
    second = leases.claim(waiting.run, "another driver", trains=False, sources=sources)
    leases.end(waiting.run, second.term)
    trusted = leases.trusted_code(waiting.run, sources)
    assert trusted
    alone(waiting, "node0")
    assert committed(waiting.run) == ["step-0000000007"]
    assert leases.trusted_code(waiting.run, sources) == trusted
