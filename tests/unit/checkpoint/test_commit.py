"""Commits and tidying where another lease, a branch or bad bytes come between."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from springtide.checkpoint import branch, commit, leases, retention
from springtide.checkpoint.commit import CommitJob, Committed, KnownCheckpoints, PieceWriter, tidy
from springtide.checkpoint.format import (
    COMMITTED,
    Meta,
    StagedPiece,
    abandon,
    checkpoints,
    committed,
    read_manifest,
)
from springtide.checkpoint.retention import Rule
from springtide.errors import ConfigError, RunExists
from springtide.storage import Folder

FROZEN, TRAINED = bytes(64), b"1"


class Writer:
    """Saves steps of a state with a frozen and a trained tensor."""

    def __init__(self, run: Folder, owner: str = "me", settings: str = "c") -> None:
        self.run, self.owner, self.settings = run, owner, settings
        self.term = leases.claim(run, owner, again=leases.newest(run) is not None).term
        self.pieces = PieceWriter(run)
        self.clock = itertools.count(1.0)

    def job(self, step: int, keep: int = 9) -> CommitJob:
        now = next(self.clock)  # each save has its own
        meta = Meta(
            step=step, tokens=step, world_size=1, order_identity="o", config_fingerprint=self.settings, saved_s=now
        )
        staged = [
            StagedPiece("model/frozen", "U8", (64,), (0,), (64,), 0, 64),
            StagedPiece("model/trained", "U8", (64,), (0,), (64,), 64, 64),
        ]
        return CommitJob(self.run.url, self.term, 0, meta, {}, staged, Rule(keep), self.owner)

    def save(self, step: int, value: int = 0, frozen: int = 0, keep: int = 9) -> Committed:
        """Save ``step``; ``value`` fills the trained tensor."""
        data, job = bytes([frozen] * 64 + [value or step] * 64), self.job(step, keep)

        def view(staged: StagedPiece) -> memoryview:
            return memoryview(data)[staged.begin :][: staged.size_bytes]

        done = self.pieces.write(job, view, lambda: False)
        tidy(self.run, job)
        return done


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


def term_of(run: Folder, step: int) -> int:
    return read_manifest(run, f"step-{step:010d}").term


def test_a_state_committed_by_an_earlier_lease_is_not_rewritten(run: Folder) -> None:
    """The state that an earlier lease has committed is not written again."""
    Writer(run).save(5)
    assert Writer(run).save(5).written_bytes == 0
    assert term_of(run, 5) == 1


def test_files_of_killed_writers_are_removed(run: Folder) -> None:
    """What killed writers left is removed and what is being written stays."""
    writer = Writer(run)
    writer.save(1)
    for name in ("step-0000000001", "step-0000000002"):
        folder = Path(run.path) / "checkpoints" / name
        folder.mkdir(exist_ok=True)
        for file, age_s in ((".tmp-old", 7200.0), (".tmp-new", 60.0)):
            (folder / file).write_bytes(b"1" * 100)
            os.utime(folder / file, (time.time() - age_s,) * 2)
    writer.save(3)
    left = sorted(str(path.relative_to(run.path)) for path in Path(run.path).rglob(".tmp-*"))
    assert left == [f"checkpoints/step-000000000{step}/.tmp-new" for step in (1, 2)]


def test_rank_0_skips_ranks_that_saw_an_older_lease_commit(run: Folder) -> None:
    """Rank 0 does not wait for ranks that have seen an older leases commit.

    It lands between the two looks for it, that of rank 0 and that of rank 1."""
    older = Writer(run)
    job = older.job(5)
    newer = Writer(run)
    mine = dataclasses.replace(newer.job(5), meta=job.meta.model_copy(update={"world_size": 2}))
    looked = 0

    def gone() -> bool:
        nonlocal looked
        looked += 1
        if looked == 1:  # the answer to the put of the older lease is late
            leases_check, commit.leases.check = commit.leases.check, lambda *_: None
            try:
                older.pieces.write(job, lambda staged: memoryview(bytes(128))[: staged.size_bytes], lambda: False)
            finally:
                commit.leases.check = leases_check
        return looked > 20

    found = newer.pieces.write(mine, lambda staged: memoryview(bytes(128))[: staged.size_bytes], gone)
    assert (found.name, looked) == ("step-0000000005", 1)
    assert read_manifest(run, found.name).term == older.term


def test_removing_a_checkpoint_keeps_files_that_are_not_ours(run: Folder) -> None:
    """A checkpoint that is removed leaves no folder and what is not ours keeps it."""
    writer, folder = Writer(run), Path(run.url) / "checkpoints"
    (folder / "step-0000000001").mkdir(parents=True)  # a save that was killed before its first file
    (folder / "step-0000000009").mkdir()  # a save that has begun
    (folder / "mine").mkdir()
    writer.save(2, value=1, frozen=1, keep=1)
    (folder / "step-0000000002" / "notes.txt").write_text("the user's")
    for step in (3, 4, 5):
        writer.save(step, frozen=step, keep=1)
    assert {name.name for name in folder.iterdir() if name.is_dir()} - {"readers"} == {
        *("mine", "step-0000000002", "step-0000000005", "step-0000000009"),
    }


def test_the_same_step_with_other_settings_is_written(run: Folder) -> None:
    """The same step with other settings is another state and is written.

    A lease that was fenced off commits late; the one that holds the run has another learning rate."""
    Writer(run).save(5)
    assert Writer(run, settings="another rate").save(5).written_bytes > 0
    assert term_of(run, 5) == 2
    assert committed(run) == ["step-0000000005"]


def test_a_commit_missing_from_the_listing_is_not_overwritten(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that the listing does not show yet is not written over.

    The answer to the commit is lost, and the folder's listing lags behind when it is tried again (NFS)."""
    writer = Writer(run)
    writer.save(5)
    monkeypatch.setattr(commit, "listed", lambda _: {})
    monkeypatch.setattr(commit, "newest_before", lambda *_: ("", b""))
    assert writer.save(5).written_bytes == 0
    writer.pieces = PieceWriter(run)  # the writer process was lost, too
    assert writer.save(5).written_bytes == 0
    assert read_manifest(run, "step-0000000005").meta.saved_s == 1.0


def test_two_commits_of_one_lease_at_the_same_moment_are_one(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that was given up is still under way when the save is tried again."""
    writer, manifest = Writer(run), commit._manifest
    writer.save(4)

    def late(*rest: Any) -> Any:
        monkeypatch.setattr(commit, "_manifest", manifest)
        writer.save(5)
        return manifest(*rest)

    monkeypatch.setattr(commit, "_manifest", late)
    writer.save(5)
    assert committed(run) == ["step-0000000004", "step-0000000005"]
    read_manifest(run, "step-0000000005")


def test_every_try_of_a_save_writes_the_same_bytes(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may have committed the index that the first try wrote, while a listing changes."""
    writer = Writer(run)
    writer.save(4)
    shown = commit.newest_before(run, "step-0000000005")
    monkeypatch.setattr(commit, "commit", lambda *_: (_ for _ in ()).throw(OSError("connection reset")))
    written = []
    for listing in (("", b""), shown):  # at first it lags behind
        monkeypatch.setattr(commit, "newest_before", lambda *_, listing=listing: listing)
        with pytest.raises(OSError, match="reset"):
            writer.save(5)
        written.append((checkpoints(run) / "step-0000000005").read("a0001-r0000.json"))
    assert written[0] == written[1]


def test_a_simultaneous_commit_of_another_state_is_detected(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another lease that commits another state at the same moment is not taken for the same."""
    fenced, create = Writer(run), Folder.create
    holder = Writer(run, settings="another rate")

    def first(folder: Folder, name: str, *rest: Any) -> None:
        monkeypatch.setattr(Folder, "create", create)
        monkeypatch.setattr(leases, "check", lambda *_: None)  # its look at the leases was before the holder's claim
        fenced.save(5)
        create(folder, name, *rest)

    monkeypatch.setattr(Folder, "create", first)
    with pytest.raises(OSError, match=r"committed .*lease 1"):
        holder.save(5)
    holder.save(5)  # it is tried again
    assert term_of(run, 5) == 2


def test_a_retried_commit_checks_the_lease_again(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that is tried again looks again who holds the run."""
    writer = Writer(run)

    def slow(folder: Folder, name: str, data: bytes, before_retry: Any) -> None:
        leases.claim(run, "me", again=True)  # while the store does not answer
        before_retry()
        raise AssertionError("it was fenced off")

    monkeypatch.setattr(commit.Folder, "create", _only(COMMITTED, slow, Folder.create))
    with pytest.raises(RunExists, match="may not write"):
        writer.save(5)
    assert committed(run) == []


def _only(wanted: str, special: Any, usual: Any) -> Any:
    return lambda folder, name, *rest: (special if name == wanted else usual)(folder, name, *rest)


def test_a_piece_of_a_replaced_checkpoint_is_not_reused(run: Folder) -> None:
    """A piece is not taken from a checkpoint that another lease has replaced."""
    first = Writer(run)
    first.save(5)
    first.save(10)  # refers to step 5 for the frozen tensor
    # the run goes back: another lease trains the steps again, with other frozen weights, and the first one's files are gone
    checkpoints(run).remove("step-0000000005")
    checkpoints(run).remove("step-0000000010")
    second = Writer(run)
    second.save(5, frozen=7)
    first.term = second.term  # a spare writer, handed on to the next group of the same process
    first.save(10)
    refers = set(read_manifest(run, "step-0000000010").refers)
    assert refers <= set(checkpoints(run).files())


def test_a_shared_piece_that_has_rotted_is_written_again(run: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """A tensor that never changes lies in one file for all checkpoints. Each save reads some of it again, drawn by its step, so
    that a new writer process, which tries the same save again, writes the same bytes."""
    writer = Writer(run)
    whole, changed = writer.save(1).written_bytes, writer.save(2).written_bytes
    assert changed < whole
    data = Path(run.path) / "checkpoints" / "step-0000000001" / "a0001-r0000.safetensors"
    damaged = bytearray(data.read_bytes())
    damaged[damaged.index(FROZEN) + 7] ^= 1
    data.write_bytes(damaged)
    index = Path(run.path) / "checkpoints" / "step-0000000003" / "a0001-r0000.json"
    written = []
    for _ in range(2):
        assert writer.save(3).written_bytes == whole
        assert "step-0000000001/a0001-r0000.safetensors" in caplog.text
        written.append(index.read_bytes())
        writer.pieces, writer.clock = PieceWriter(run), itertools.count(3.0)
        (checkpoints(run) / "step-0000000003").remove(COMMITTED)
    assert written[0] == written[1]
    writer.save(3)
    assert writer.save(4).written_bytes == changed, "and the next one refers to what was written again"


def test_an_unreadable_manifest_keeps_the_files_it_may_name(run: Folder) -> None:
    """A checkpoint whose manifest cannot be read keeps the files that it may refer to."""
    writer = Writer(run)
    writer.save(5)
    writer.save(10)
    shared = read_manifest(run, "step-0000000010").refers
    assert shared
    manifest = read_manifest(run, "step-0000000010")
    file = f"step-0000000010/{manifest.name}"
    data = checkpoints(run).read(file)
    checkpoints(run).write(file, b"{")  # a store that answers nonsense for a while
    for step in (15, 20, 25):
        writer.save(step, frozen=step, keep=1)
    checkpoints(run).write(file, data)
    assert set(shared) <= set(checkpoints(run).files())
    assert f"step-0000000010/{COMMITTED}" in checkpoints(run).files()


@pytest.mark.parametrize("when", ["before the mark is taken away", "after"])
def test_a_branch_from_a_removed_checkpoint_is_whole_or_refused(
    run: Folder, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A branch from a checkpoint that is being removed has it whole or is refused."""
    writer, being_read, remove = Writer(run), retention.being_read, Folder.remove_files
    writer.save(5)
    writer.save(10)
    url, looks, said = f"{run.url}/checkpoints/step-0000000005", 0, ""

    def begin_branch() -> None:
        nonlocal said
        try:
            branch.keep(url, "branch")
        except ConfigError as error:
            said = str(error)

    def look(of: Folder) -> set[str]:
        nonlocal looks
        looks += 1
        found = being_read(of)
        if looks == 1 and when != "after":  # tidy has seen no note
            begin_branch()
        return found

    def taken_away(folder: Folder, names: Sequence[str]) -> None:
        remove(folder, names)
        if f"step-0000000005/{COMMITTED}" in names and when == "after":
            begin_branch()

    monkeypatch.setattr(retention, "being_read", look)
    monkeypatch.setattr(Folder, "remove_files", taken_away)
    writer.save(15, keep=1)
    monkeypatch.undo()
    if when == "after":
        assert "removed" in said
        assert retention.being_read(run) == set(), "a run that was refused keeps nothing"
    else:
        assert said == ""
        assert "step-0000000005" in committed(run)
        read_manifest(run, "step-0000000005")
        assert set(read_manifest(run, "step-0000000005").files) <= {
            file.partition("/")[2] for file in checkpoints(run).files() if file.startswith("step-0000000005/")
        }


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The requests of all folders from now on, by kind; a listing of everything counts a page per thousand names."""
    asked = Counter[str]()

    def count(kind: str) -> None:
        before = getattr(Folder, kind)

        def call(folder: Folder, *rest: Any, **named: Any) -> Any:
            asked[kind] += 1
            return before(folder, *rest, **named)

        monkeypatch.setattr(Folder, kind, call)

    for kind in ("read", "names", "files", "exists", "create", "put_stream", "remove", "remove_files"):
        count(kind)
    return asked


@pytest.mark.parametrize("kept", [1, 6])
def test_requests_of_a_save_do_not_grow_with_the_run(run: Folder, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """What a rank asks the store in a save does not grow with what lies there.

    It listed all files of all checkpoints, on each rank. What it has written itself it does not read again."""
    writer = Writer(run)
    for step in range(1, 1 + kept):
        writer.save(step)
    for number in range(40):  # as if there had been more ranks
        checkpoints(run).write(f"step-{kept:010d}/a0001-r{number + 10:04d}.json", b"{}")
    job = dataclasses.replace(writer.job(10), rank=1)
    asked = counted(monkeypatch)
    writer.pieces.write(job, lambda staged: memoryview(bytes(128))[: staged.size_bytes], lambda: False)
    # whether the step is committed; which is the newest before it, and its three marks; data and index
    assert asked == {"names": 1, "read": 4, "put_stream": 2}


def test_a_large_group_does_not_read_all_indexes_after_a_resize(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a resize of a large group no rank reads the indexes of all."""
    writer = Writer(run)
    writer.save(5)
    manifest = read_manifest(run, "step-0000000005")
    [mine] = manifest.indexes
    for ranks, reads in ((commit._MOST_INDEXES, commit._MOST_INDEXES), (commit._MOST_INDEXES + 1, 0)):
        files = {f"a0001-r{rank:04d}.json": manifest.files[mine] for rank in range(ranks)}
        of_many = manifest.model_copy(
            update={"files": files, "meta": manifest.meta.model_copy(update={"world_size": ranks})}
        )
        monkeypatch.setattr(commit, "read_manifest", lambda *_, of_many=of_many: of_many)
        asked = list[str]()
        monkeypatch.setattr(commit, "read_index", lambda folder, name, _, asked=asked: asked.append(name) or ({}, []))
        PieceWriter(run)._base(writer.job(10))
        assert len(asked) == reads


def test_a_save_reads_only_the_newest_manifests(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many checkpoints that are kept a save reads the newest manifests alone."""
    writer, known, read = Writer(run), KnownCheckpoints(), list[str]()
    for step in range(1, 8):
        writer.save(step)
    real = commit.read_manifest
    monkeypatch.setattr(commit, "read_manifest", lambda run, name: read.append(name) or real(run, name))
    rule = Rule(2, every=1)
    tidy(run, dataclasses.replace(writer.job(7), retention=rule), known)
    assert len(read) == 7
    read.clear()
    tidy(run, dataclasses.replace(writer.job(7), retention=rule), known)
    assert read == ["step-0000000006", "step-0000000007"]
    # one that was marked meanwhile is looked at again, and what is removed is the same as without what is known
    abandon(run, ["step-0000000003"], "a device was wrong", writer.term)
    read.clear()
    tidy(run, writer.job(7, keep=2), known)
    assert read == ["step-0000000003", "step-0000000006", "step-0000000007"]
    assert committed(run) == ["step-0000000006", "step-0000000007"]
    assert {name for name, _ in known} >= {"step-0000000006", "step-0000000007"}


def test_all_files_that_retention_removes_go_in_two_requests(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the commit markers, which go first, and one for the rest."""
    writer = Writer(run)
    for step in (1, 2, 3):
        writer.save(step, frozen=step)
    asked = counted(monkeypatch)
    tidy(run, writer.job(3, keep=1))
    assert asked["remove_files"] == 2
    assert asked["remove"] == 0
    assert committed(run) == ["step-0000000003"]
