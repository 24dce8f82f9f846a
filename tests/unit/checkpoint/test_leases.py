"""What a claim costs and finds out: requests that do not grow with restarts, losses, and stores without conditional puts."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from springtide.checkpoint import leases
from springtide.errors import LeaseOvertaken, RunExists
from springtide.storage import Folder
from springtide.training.group_lease import GroupLease


class CountingFolder(Folder):
    """Counts its requests."""

    requests: ClassVar[Counter[str]] = Counter()

    def __truediv__(self, name: str) -> CountingFolder:
        return CountingFolder(f"{self.url}/{name}")

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("read", "names", "create", "exists", "write"):
            CountingFolder.requests[name] += 1
        return found


def test_requests_of_a_restart_do_not_grow_with_restarts() -> None:
    """A restart takes as many requests after a hundred restarts as after three."""
    run, seen = CountingFolder(f"memory:///counted-{uuid.uuid4().hex}"), []
    driver = leases.claim(run, "driver", trains=False)
    for restart in range(100):
        CountingFolder.requests.clear()
        group = leases.claim(run, "driver", again=True)
        assert leases.has_trained(run, group.term) == (restart > 0)
        assert leases.losses(run) == restart // 2  # every other one leaves as it was asked to
        seen.append(CountingFolder.requests.total())
        if restart % 2 == 0:
            leases.end(run, group.term)
    assert driver.losses == driver.groups == 0
    assert seen[99] == seen[3] <= 9


def test_only_a_group_that_does_not_end_is_lost(tmp_path: Path) -> None:
    """A group that goes back or leaves is not lost and one that does not end is."""
    run = Folder(tmp_path)
    leases.claim(run, "driver", trains=False)
    group = GroupLease(run, "driver", "node")
    group.term = group.claim()
    group.term = group.claim(ends=group.term)  # as go_back does
    assert (leases.losses(run), leases.has_trained(run, group.term)) == (0, False)
    later = GroupLease(run, "driver", "node")
    later.claim()
    assert leases.losses(run) == 1
    again = leases.claim(run, "driver", trains=False)
    assert (again.groups, again.losses) == (2, 2)


def test_snapshots_before_a_rollback_or_fresh_start_do_not_count(tmp_path: Path) -> None:
    """Snapshots from before a rollback or a fresh start do not count."""
    run = Folder(tmp_path)
    assert leases.snapshots_since(run) == 1
    leases.note_rollback(run, 3)  # by the group that takes snapshots in lease 3
    assert leases.snapshots_since(run) == 3
    leases.note_scratch(run, 5)  # by a driver, which takes none
    assert leases.snapshots_since(run) == 6


class Careless(MemoryFileSystem):  # type: ignore[misc]
    """A store that ignores ``mode="create"``, as one without If-None-Match."""

    protocol = "careless"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        super().pipe_file(path, value)


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> Folder:
    folder = Folder(f"memory:///careless-{uuid.uuid4().hex}")
    fs = Careless()
    monkeypatch.setattr(Folder, "__truediv__", lambda self, name: _at(fs, f"{self.path}/{name}"))
    folder.fs = fs
    return folder


def _at(fs: Any, path: str) -> Folder:
    folder = Folder("memory://x")
    folder.fs, folder.path = fs, path
    return folder


def test_a_store_without_conditional_puts_warns_once(careless: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """A store without conditional puts says so at the first claim only."""
    with caplog.at_level(logging.WARNING):
        leases.claim(careless, "first", trains=False)
    assert "conditional put" in caplog.text
    caplog.clear()
    leases.claim(careless, "first", again=True)
    assert caplog.text == ""
    assert (careless / "leases").names() == ["0001.json", "0002.json"]


def test_the_slower_of_two_simultaneous_claims_is_refused(careless: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that claim the same term of such a store the slower one is refused."""
    read_json = Folder.read_json
    other = leases.Lease(term=1, owner="other", host="h", pid=1, begun_s=0.0)

    def meanwhile(folder: Folder, name: str) -> Any:
        folder.write_json(name, dataclasses.asdict(other))  # before the claim is read back
        return read_json(folder, name)

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "read_json", meanwhile)
        with pytest.raises(RunExists, match=r"claimed .*lease 1"):
            leases.claim(careless, "mine")
    # after it has been read back, the fence tells owners of one term apart
    leases.check(careless, 1)
    leases.check(careless, 1, "other")
    with pytest.raises(RunExists, match="may not write"):
        leases.check(careless, 1, "mine")


def test_refusal_names_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker group's lease is the newest one, but the driver is the process to stop: it replaces its groups."""
    run = Folder(tmp_path)
    driver = leases.claim(run, "driver", trains=False)
    group = leases.claim(run, "driver", again=True)
    monkeypatch.setattr(leases, "_is_alive", lambda run, lease: lease.term == group.term)
    for refused in (leases.check_free, lambda run: leases.claim(run, "another")):
        with pytest.raises(RunExists, match=rf"is held by lease {driver.term}, begun"):
            refused(run)


def test_a_newer_lease_of_the_same_owner_is_told_apart(tmp_path: Path) -> None:
    """One that cannot be read may be anybody's."""
    run = Folder(tmp_path)
    mine = leases.claim(run, "us", trains=False).term
    leases.check(run, mine, "us")
    newer = leases.claim(run, "us", trains=False, again=True).term
    with pytest.raises(LeaseOvertaken):
        leases.check(run, mine, "us")
    for owner in ("they", ""):
        with pytest.raises(RunExists) as caught:
            leases.check(run, mine, owner)
        assert type(caught.value) is RunExists
    (tmp_path / "leases" / f"{newer:04d}.json").write_text("{")
    with pytest.raises(RunExists) as caught:
        leases.check(run, mine, "us")
    assert type(caught.value) is RunExists
