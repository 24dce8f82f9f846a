"""Bytes are bad only when two readers say so, and a run that has committed never begins at step 0 by itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from layouts import load_on_a_broken_rank, save_in
from ranks import each
from saving import meta, resume, save, state

from springtide.checkpoint import leases
from springtide.checkpoint.format import ABANDONED, COMMITTED, QUARANTINED, committed, quarantine
from springtide.checkpoint.fresh_start import begin_from_scratch, begin_once, check_order, has_ever_committed
from springtide.checkpoint.inspect import inspect
from springtide.checkpoint.leases import process_id
from springtide.checkpoint.restore import restore
from springtide.checkpoint.second_reader import BadFileReport, second_readers
from springtide.errors import CheckpointError, ConfigError, RunExists, UnfitNode
from springtide.storage import Folder
from springtide.training.__main__ import job_of_torchrun

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]


def test_one_rank_that_cannot_read_condemns_no_checkpoint_and_is_named(tmp_path: Path, ranks: Ranks) -> None:
    url = str(tmp_path)
    ranks(2, each, [(save_in, ("fsdp", url, step)) for step in (5, 10)])
    hows = ("memory", "mount", "digest")
    for memory, mount, digest in ranks(2, each, [(load_on_a_broken_rank, (how, url)) for how in hows]):
        # a rank that fails alone leaves no other in a collective
        assert memory.startswith("RuntimeError: rank 1 cannot load step-0000000010 of"), memory
        assert memory.endswith("RuntimeError: no memory")
        assert mount.startswith("UnfitNode"), mount
        assert "rank 1 on node node-1" in mount
        assert digest.startswith("UnfitNode"), digest
        assert "rank 1 on node node-1 finds step-00000000" in digest
        assert "digest expected" in digest
    assert committed(Folder(tmp_path)) == ["step-0000000005", "step-0000000010"]
    assert not list(tmp_path.rglob(QUARANTINED))
    assert not (tmp_path / "unmounted").exists(), "a reader makes no folder where the storage should be"


@pytest.mark.parametrize("answer", ["", "bad there, too", None])
def test_the_word_of_one_node_counts_only_where_no_other_can_read(answer: str | None, tmp_path: Path) -> None:
    """A world of one, whose node reads other bytes than it wrote: its second reader would be itself."""
    save(str(tmp_path), [5, 10], stage_in="")
    run, asked = Folder(tmp_path), []
    [file] = tmp_path.glob("checkpoints/step-0000000010/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")

    def elsewhere(run: Folder, name: str, file: str, nodes: Collection[str]) -> str | None:
        asked.append((name, file.partition("/")[0], list(nodes)))
        return answer

    found = None
    with (
        pytest.raises(UnfitNode, match="rank 0 on node node-1 finds step-0000000010/")
        if answer == ""
        else nullcontext()
    ):
        found = restore(run, *state(0), lambda step: "o", node="node-1", term=1, elsewhere=elsewhere)
    assert asked == [("step-0000000010", "step-0000000010", ["node-1"])]
    if answer == "":
        assert committed(run) == ["step-0000000005", "step-0000000010"]
    else:  # also where there is no other node: a laptop
        assert found
        assert found.name == "step-0000000005"
        assert committed(run) == ["step-0000000005"]


def test_the_last_checkpoint_that_counts_is_never_put_in_quarantine(tmp_path: Path) -> None:
    save(str(tmp_path), [5, 10], stage_in="")
    for file in tmp_path.glob("checkpoints/*/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"step-0000000005 is the last usable one, .* or pass --from-scratch"):
            resume(str(tmp_path))
    assert committed(Folder(tmp_path)) == ["step-0000000005"]


@pytest.mark.parametrize("how", ["quarantined", "removed", "removed with its claims' notes"])
def test_a_run_without_a_checkpoint_that_counts_does_not_begin_at_step_0(tmp_path: Path, how: str) -> None:
    run = Folder(tmp_path)
    assert not has_ever_committed(run)
    assert resume(str(tmp_path))["step"] == 0  # it never has: nothing to lose; it commits step 5
    assert has_ever_committed(run)
    if how == "quarantined":
        quarantine(run, "step-0000000005", "by hand")
    elif how == "removed":
        shutil.rmtree(tmp_path / "checkpoints")
    else:  # the marker alone says so, as after a commit that could not be noted
        for note in tmp_path.glob("leases/*.committed"):
            note.unlink()
        quarantine(run, "step-0000000005", "by hand")
    with pytest.raises(
        CheckpointError, match=r"has committed checkpoints before, and none of them counts now.*--from-scratch"
    ):
        resume(str(tmp_path))
    number = leases.claim(run, "user", trains=False).term
    assert begin_from_scratch(run, number) == []
    assert resume(str(tmp_path))["step"] == 0
    assert committed(run) == ["step-0000000005"]
    assert has_ever_committed(run)


def test_from_scratch_sets_good_checkpoints_aside(tmp_path: Path) -> None:
    run = Folder(tmp_path)
    save(str(tmp_path), [5, 10], stage_in="")
    begun = begin_from_scratch(run, leases.claim(run, "user", trains=False).term)
    assert begun == ["step-0000000005", "step-0000000010"]
    assert [(one.state, one.reason) for one in inspect(run, verify=True)] == [
        ("abandoned", "the run was begun again with --from-scratch")
    ] * 2
    assert resume(str(tmp_path))["step"] == 0


def test_from_scratch_that_breaks_off_leaves_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Folder(tmp_path)
    save(str(tmp_path), [5, 10], stage_in="")
    term, write = leases.claim(run, "user", trains=False).term, Folder.write

    def breaks_off(folder: Folder, name: str, *data: Any) -> None:
        if name.startswith("step-0000000010"):
            raise OSError("503 Slow Down")
        write(folder, name, *data)

    monkeypatch.setattr(Folder, "write", breaks_off)
    with pytest.raises(OSError, match="503"):
        begin_from_scratch(run, term)
    monkeypatch.undo()
    assert (committed(run), leases.begun_at(run)) == (["step-0000000010"], 0)
    assert begin_once(run, term, "job 1")
    assert not begin_once(run, term, "job 1")
    assert begin_once(run, term, "job 2")
    begin_from_scratch(run, term + 1)  # a group of job 2 that goes back before its first checkpoint
    assert not begin_once(run, term + 2, "job 2")
    assert begin_once(run, term, "")  # nobody knows who asks: as often as it is asked


def test_torchruns_job_is_known_by_its_name_or_on_one_node_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert job_of_torchrun() == ""
    monkeypatch.setenv("WORLD_SIZE", "1")  # as other launchers do, which start no group again
    assert job_of_torchrun() == ""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert job_of_torchrun() == "mine"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as torchrun says where nobody names it
    assert process_id(os.getppid()) in job_of_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"--from-scratch.*give torchrun --rdzv-id NAME"):
        job_of_torchrun()


def test_a_skip_older_than_every_checkpoint_abandons_none(tmp_path: Path) -> None:
    run = Folder(tmp_path)
    save(str(tmp_path), [5, 10], stage_in="")
    assert not check_order(run, lambda step: "another", go_back=True)
    assert committed(run) == ["step-0000000005", "step-0000000010"]
    assert check_order(run, lambda step: "another" if step > 5 else "o", go_back=True, term=7)
    assert committed(run) == ["step-0000000005"]
    assert (run / "checkpoints" / "step-0000000010").read_json(ABANDONED)["term"] == 7


def test_a_slower_attempt_leaves_the_marks_of_a_newer_one_alone(tmp_path: Path) -> None:
    """The newer one marked the step that the slower one is about to commit."""
    run = Folder(tmp_path)
    save(str(tmp_path), [5], stage_in="")
    quarantine(run, "step-0000000005", "seen by a newer lease", term=9)
    [outcome] = save(str(tmp_path), [5], stage_in="")
    assert isinstance(outcome.error, RunExists)
    marks = set((run / "checkpoints" / "step-0000000005").names())
    assert {COMMITTED, QUARANTINED} <= marks
    assert meta(5).step == 5


def test_who_reads_again() -> None:
    """Another node first, then one without a problem of its own; alone, the same rank."""
    good, bad = BadFileReport("a"), BadFileReport("b", "digest", "step/file")
    assert second_readers([good, bad]) == {"step/file": 0}
    assert second_readers([bad, good._replace(node="b"), good]) == {"step/file": 2}
    assert second_readers([bad, good._replace(node="b")]) == {"step/file": 1}
    assert second_readers([bad]) == {"step/file": 0}
    assert second_readers([good, BadFileReport("b", "lacks elements")]) == {}
    everyone = [BadFileReport(node, "digest", f"step/{number}") for number, node in enumerate("aabb")]
    assert second_readers(everyone) == {"step/0": 2, "step/1": 3, "step/2": 0, "step/3": 1}
