"""Whatever is removed, the newest good checkpoint and all it refers to stay; nothing that is read goes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.checkpoint.format import ABANDONED, COMMITTED, QUARANTINED, name_of
from springtide.checkpoint.retention import Found, Rule, being_read, garbage, kept, note_reader
from springtide.storage import Folder

rules = st.builds(
    Rule, last=st.integers(0, 4), every=st.sampled_from([0, 2, 5]), best=st.integers(0, 3), metric=st.just("loss")
)


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Found]:
    """Checkpoints of a run with killed saves, bad ones, several leases and references to older files."""
    found: dict[str, Found] = {}
    older: list[str] = []
    term = 1
    for step in range(1, draw(st.integers(0, 14)) + 1):
        term += draw(st.integers(0, 1))
        name = name_of(step)
        own = {f"a{term:04d}-r0000.safetensors", f"a{term:04d}-r0000.json", f"a{term:04d}-manifest.json"}
        left = {f"a{term - 1:04d}-r0000.safetensors"} if draw(st.booleans()) else set()
        is_committed, mark = draw(st.booleans()), draw(st.sampled_from([None, None, None, ABANDONED, QUARANTINED]))
        refers = set(draw(st.lists(st.sampled_from(older), max_size=3))) if older else set()
        marks = ({COMMITTED} if is_committed else set()) | ({mark} if mark else set())
        needs = {f"{name}/{file}" for file in own} | refers if is_committed else set()
        found[name] = Found(
            files=frozenset(own | left | marks),
            counts=is_committed and mark is None,
            metrics={"loss": draw(st.floats(0, 10))} if draw(st.booleans()) else {},
            needs=frozenset(needs),
            agreed_step=draw(st.none() | st.integers(0, step)),
        )
        if is_committed:
            older.append(f"{name}/a{term:04d}-r0000.safetensors")
    return found


def test_one_from_before_the_last_agreement_of_all_devices_is_kept() -> None:
    """The newer ones are abandoned if a device turns out to be wrong."""
    agreed = {10: 4, 20: 4, 30: 17, 40: 17}
    found = {name_of(step): Found(frozenset(), True, {}, frozenset(), agreed[step]) for step in agreed}
    assert kept(found, Rule(last=2)) == {name_of(step) for step in (10, 30, 40)}
    unchecked = {name: one._replace(agreed_step=None) for name, one in found.items()}
    assert kept(unchecked, Rule(last=2)) == {name_of(step) for step in (30, 40)}


@given(histories(), rules, st.data())
def test_nothing_that_anyone_may_need_is_removed(found: dict[str, Found], rule: Rule, data: st.DataObject) -> None:
    reading = set(data.draw(st.lists(st.sampled_from(sorted(found)), max_size=2))) if found else set()
    term = data.draw(st.integers(1, 15))
    keep = kept(found, rule)
    counting = sorted(name for name, one in found.items() if one.counts)
    assert keep <= set(counting)
    assert set(counting[-max(rule.last, 1) :]) <= keep
    if rule.every:
        assert {name for name in counting if int(name[5:]) % rule.every == 0} <= keep
    losses = sorted((found[name].metrics["loss"], name) for name in counting if "loss" in found[name].metrics)
    assert {name for _, name in losses[: rule.best]} <= keep
    agreements = [step for name in counting if (step := found[name].agreed_step) is not None]
    good = [name for name in counting if agreements and int(name[5:]) <= max(agreements)]
    assert set(good[-1:]) <= keep, "the one to go back to if a device is found to be wrong"
    removed = garbage(found, rule, reading, term)
    assert len(set(removed)) == len(removed)
    for name in keep | reading:
        assert not found[name].needs & set(removed)
        assert f"{name}/{COMMITTED}" not in removed
    for whole in removed:
        name, file = whole.split("/")
        assert file in found[name].files
        assert name <= max(counting), "what is newer than the newest is somebody's work"
        if file.startswith("a"):
            assert int(file[1:5]) <= term, "a newer lease's work"
    if removed:  # a marker goes before all that it vouches for
        markers = [whole.endswith(COMMITTED) for whole in removed]
        assert markers == sorted(markers, reverse=True)


@given(histories(), rules)
def test_what_the_rule_does_not_keep_goes_at_last(found: dict[str, Found], rule: Rule) -> None:
    keep = kept(found, rule)
    removed = set(garbage(found, rule, set(), 99))
    if not keep:
        assert not removed
        return
    left = {name: {file for file in one.files if f"{name}/{file}" not in removed} for name, one in found.items()}
    oldest_of_last = sorted(name for name, one in found.items() if one.counts)[-max(rule.last, 1) :][0]
    for name, files in left.items():
        if name not in keep and name < oldest_of_last:
            needed = frozenset().union(
                *(one.needs for other, one in found.items() if other >= oldest_of_last or other in keep)
            )
            assert {f"{name}/{file}" for file in files} <= needed


def test_a_readers_note_keeps_a_checkpoint_and_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Folder(tmp_path)
    with note_reader(run, name_of(5)), note_reader(run, name_of(5)), note_reader(run, name_of(10)):
        assert being_read(run) == {name_of(5), name_of(10)}
    assert being_read(run) == set()
    dead = note_reader(run, name_of(5))
    dead.__enter__()  # and never left: a reader that was killed
    assert being_read(run) == {name_of(5)}
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    assert being_read(run) == set()
    assert (run / "checkpoints" / "readers").names() == []


def test_a_reader_that_takes_longer_than_its_note_lasts_renews_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide.checkpoint.retention._READER_S", 0.2)
    run, readers = Folder(tmp_path), tmp_path / "checkpoints" / "readers"
    with note_reader(run, name_of(5)):
        [note] = readers.iterdir()
        until_s = json.loads(note.read_text())["until_s"]
        deadline = time.monotonic() + 60
        while json.loads(note.read_text())["until_s"] < until_s + 0.4:
            assert time.monotonic() < deadline
            time.sleep(0.01)  # between looks at the note
    assert not list(readers.iterdir())


@pytest.mark.parametrize("note", ["", "[]", "{}", '{"until_s": "never"}', "[" * 100_000])
def test_a_damaged_note_of_a_reader_keeps_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, note: str
) -> None:
    run = Folder(tmp_path)
    run.write("checkpoints/readers/step-0000000005.branch", note)
    assert being_read(run) == {"step-0000000005"}
    assert being_read(run) == {"step-0000000005"}
    [told] = [record.getMessage() for record in caplog.records]
    assert "readers/step-0000000005.branch" in told


def test_what_is_not_ours_in_a_checkpoints_folder_stays() -> None:
    """An export, notes: somebody put them beside the files of a checkpoint, and nothing else has them."""
    ours = {COMMITTED, "a0001-manifest.json", "a0001-r0000.json", "a0001-r0000.safetensors"}
    theirs = {"model_export.bin", "mine", "a.txt", "COMMITTED.bak", "a0001-notes.txt"}
    found = {
        name_of(step): Found(
            files=frozenset(ours | theirs),
            counts=True,
            metrics={},
            needs=frozenset(f"{name_of(step)}/{f}" for f in ours),
        )
        for step in (1, 2)
    }
    rule = Rule(last=1, every=0, best=0)
    removed = garbage(found, rule, set(), 1)
    assert set(removed) == {f"{name_of(1)}/{file}" for file in ours}
    left = {
        name_of(1): found[name_of(1)]._replace(files=frozenset(theirs), counts=False),
        name_of(2): found[name_of(2)],
    }
    assert garbage(left, rule, set(), 1) == []
