"""Saving beside training: what is due, what waits, what fails, and what a resumed run draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3_faults
import s3_server
from loops import SLOW_WRITER, train, train_with_dropout, train_with_short_intervals, train_with_writer
from ranks import each, run_here

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.format import committed, read_manifest
from springtide.config import Config
from springtide.elastic import GroupRequest
from springtide.errors import CheckpointError
from springtide.events import (
    Evaluated,
    Event,
    Rejected,
    Saved,
    SaveFailed,
    SaveIntervalChanged,
    SaveSkipped,
    Started,
    StepDone,
)
from springtide.storage import Folder

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]


def named(config: Config, name: str, steps: int, **changes: Any) -> Config:
    given = {key.replace("__", "."): value for key, value in changes.items()}
    fixed = {"run.id": name, "train.total": steps * config.tokens_per_step, "optim.warmup": 0, "train.eval_tokens": 0}
    fixed |= {"checkpoint.stage": "/dev/shm"}
    return config.override({**fixed, **given})


def of(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_save_that_is_due_while_one_is_written_is_left_out_or_waited_for(tiny: Config, ranks: Ranks) -> None:
    every = {"checkpoint__every_steps": 2}
    skipping = named(tiny, "skip", 9, **every, checkpoint__when_busy="skip")
    queueing = named(tiny, "queue", 12, checkpoint__every_steps=3, checkpoint__when_busy="queue")
    calls: list[Any] = [
        (train_with_writer, (skipping, SLOW_WRITER)),
        (train_with_writer, (named(skipping, "asked", 9), SLOW_WRITER, 3, GroupRequest.SAVE)),
        (train_with_writer, (queueing, SLOW_WRITER, 4, GroupRequest.SAVE)),
    ]
    skipped, asked, queued = ranks(2, each, calls)[0]
    assert of(skipped, SaveSkipped)
    assert all("is still being written" in event.reason for event in of(skipped, SaveSkipped))
    saved = [event.step for event in of(skipped, Saved)]
    assert saved[-1] == 9
    assert not set(saved) & {event.step for event in of(skipped, SaveSkipped)}
    # what somebody asked for is not left out, saved once, and trained on
    assert [event.step for event in of(asked, Saved)][:2] == [2, 3]
    assert [event.step for event in of(queued, Saved)] == [3, 4, 6, 9, 12]
    assert len(of(queued, StepDone)) == 12
    assert not of(queued, SaveSkipped)
    # two are never under way: each is safe before the step after the next save's
    order = [(type(event), event.step) for event in queued if isinstance(event, Saved | StepDone)]
    for step, after_next in ((3, 5), (4, 7), (6, 10)):
        assert order.index((Saved, step)) < order.index((StepDone, after_next))


@pytest.mark.parametrize("ask", [GroupRequest.LEAVE, pytest.param(GroupRequest.STOP, marks=pytest.mark.full)])
def test_a_group_that_is_to_end_saves_first_and_the_next_one_evaluates(tiny: Config, ask: GroupRequest) -> None:
    config = named(
        tiny,
        ask.value,
        6,
        train__eval_tokens=8 * tiny.shards.sequence_length,
        train__eval_every=2,
        checkpoint__every_steps=6,
    )
    ended = run_here(train, config, 4, ask)
    assert [event.step for event in of(ended, Evaluated)] == [0, 2]
    assert of(ended, Saved)[-1].step == 4
    resumed = run_here(train, config, 5, ask)  # at a step without an evaluation
    assert [type(event) for event in resumed][:3] == [Started, Evaluated, StepDone]
    assert [event.step for event in of(resumed, Evaluated)] == [4]
    again = run_here(train, config)
    assert [event.step for event in of(again, Evaluated)] == [6]
    # what a checkpoint has is not measured again
    assert of(run_here(train, config), Evaluated) == []


def test_failing_saves_are_counted_and_stop_the_run_at_the_limit_only(
    tiny: Config, ranks: Ranks, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    with s3_faults.proxy(os.environ["AWS_ENDPOINT_URL"]) as (url, faults), s3_server.pointing_to(url):
        options = {"checkpoint__every_steps": 3, "checkpoint__tries": 1, "checkpoint__when_busy": "queue"}
        config = named(tiny, "failing", 12, run__root=f"{s3}/runs", **options, checkpoint__max_failed=2)
        faults.only = "safetensors"
        faults.set("deny", 3)  # of the first save both ranks' parts, of the second one
        events = ranks(2, train, config)[0]
        failures = of(events, SaveFailed)
        assert [(event.step, event.in_a_row) for event in failures] == [(3, 1), (6, 2)]
        assert all("lacked the necessary privileges" in event.reason for event in failures)
        assert [event.step for event in of(events, Saved)] == [9, 12]
        faults.set("deny")
        again = named(tiny, "failing", 24, run__root=f"{s3}/runs", **options, checkpoint__max_failed=2)
        with pytest.raises(AssertionError, match=r"3 saves failed one after the other \(checkpoint.max_failed = 2\)"):
            ranks(2, train, again)
        faults.set("")
        folder = Folder(config.run.root) / "failing"
        assert committed(folder)[-1] == "step-0000000012"
        started = of(run_here(train, again.override({"checkpoint.stage": ""})), Started)[0]
        assert started.step == 12
    assert leases.losses(folder) == 1


@pytest.mark.full
def test_auto_saves_when_it_pays_and_says_when_the_cadence_changes(tiny: Config, ranks: Ranks) -> None:
    events = ranks(2, train_with_short_intervals, named(tiny, "auto", 120, checkpoint__every_steps="auto"))[0]
    saved, told = of(events, Saved), of(events, SaveIntervalChanged)
    assert len(saved) >= 2  # by the clock, and at the end; how many more is up to how long a save takes
    assert told
    assert all(0.2 <= event.every_s <= max(0.4, *(one.save_time_s for one in saved)) for event in told)
    assert "a loss comes every 4.00 h" in told[0].reason
    assert saved[-1].step == 120


@pytest.mark.full
def test_a_resumed_run_draws_what_it_would_have_drawn(tiny: Config, ranks: Ranks) -> None:
    """The state of random generators is a function of the step: dropout, and a user's numpy and random, go on as they would."""
    config = named(tiny, "drawn", 12, checkpoint__every_steps=5)
    whole = {event.step: event.loss for event in of(ranks(2, train_with_dropout, config)[0], StepDone)}
    other = named(config, "drawn-again", 12)
    first = of(ranks(2, train_with_dropout, other, 7)[0], StepDone)
    second = of(ranks(2, train_with_dropout, other)[0], StepDone)
    assert [event.step for event in first + second] == list(range(1, 13))
    for event in first + second:
        assert event.loss == pytest.approx(whole[event.step], abs=1e-6)
    plain = {event.step: event.loss for event in of(ranks(2, train, named(config, "plain", 12))[0], StepDone)}
    assert abs(plain[1] - whole[1]) > 1e-3  # it does drop
    reseeded = of(ranks(2, train_with_dropout, named(config, "reseeded", 2, train__seed=1))[0], StepDone)
    assert abs(reseeded[0].loss - whole[1]) > 1e-4


def test_a_checkpoint_says_whose_it_is_and_no_secret(tiny: Config, ranks: Ranks, s3: str) -> None:
    config = named(tiny, "whose", 4, run__root=f"{s3}/runs", checkpoint__every_steps=2)
    ranks(2, train, config)
    run = Folder(config.run.root) / "whose"
    manifest = read_manifest(run, committed(run)[-1])
    assert manifest.meta.config_fingerprint == configs.fingerprint(config)
    assert manifest.meta.code_fingerprint == configs.code_fingerprint()
    assert configs.build(manifest.config) == config
    assert (manifest.meta.step, manifest.meta.tokens) == (4, 4 * config.tokens_per_step)
    assert manifest.meta.metrics["loss"] > 0
    secrets = [value for name, value in s3_server.environment("").items() if "KEY" in name]
    for name, files in {name: (run / "checkpoints" / name).names() for name in committed(run)}.items():
        for file in files:
            data = (run / "checkpoints" / name).read(file)
            assert not any(secret.encode() in data for secret in secrets if secret != "springtide")


def test_the_best_and_every_mth_are_kept(tiny: Config) -> None:
    rule = {"checkpoint__keep_last": 1, "checkpoint__keep_every": 6, "checkpoint__keep_best": 1}
    queue = {"checkpoint__every_steps": 2, "checkpoint__when_busy": "queue"}
    run_here(train, named(tiny, "kept", 15, **rule, **queue))
    run = Folder(tiny.run.root) / "kept"
    losses = {name: read_manifest(run, name).meta.metrics["loss"] for name in committed(run)}
    assert {"step-0000000006", "step-0000000012", "step-0000000015"} <= set(losses)
    assert len(losses) <= 4


def test_a_run_walks_back_over_several_bad_ones_and_stops_when_none_is_left(tiny: Config, ranks: Ranks) -> None:
    queue = {"checkpoint__every_steps": 2, "checkpoint__when_busy": "queue"}
    config = named(tiny, "rotten", 6, **queue)
    ranks(2, train, config)
    folder = Path(config.run.root) / "rotten" / "checkpoints"
    flipped = next((folder / "step-0000000006").glob("*r0001.safetensors"))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    short = next((folder / "step-0000000004").glob("*r0000.safetensors"))
    short.write_bytes(short.read_bytes()[:-7])
    events = ranks(2, train, config)[0]
    first, second, started = events[:3]
    assert [(event.name, event.step) for event in (first, second) if isinstance(event, Rejected)] == [
        ("step-0000000006", 2),
        ("step-0000000004", 2),
    ]
    assert f"{flipped.name}: bytes " in first.reason
    assert isinstance(started, Started)
    assert started.resumed_from == "step-0000000002"
    assert committed(Folder(config.run.root) / "rotten")[-1] == "step-0000000006"  # written anew
    for file in folder.glob("*/*r0001.json"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints of .* can be used: step-0000000006: "):
        run_here(train, config)
