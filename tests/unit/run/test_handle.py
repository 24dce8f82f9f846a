"""What a handle says of a run, from its journal alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from journal_events import step

from springtide.config import Config
from springtide.events import Event, Sampled, Started, Stopped, event
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.tracking.journal import Journal


def run_of(config: Config, events: list[Event]) -> Run:
    run = Run(Folder(config.run.root) / "mine")
    run.write_config(config)
    with Journal(run.folder) as journal:
        for event in events:
            journal(event)
    return run


def test_status_is_how_the_last_start_ended(tiny: Config) -> None:
    run = run_of(tiny, [])
    assert (run.status, run.starts) == ("not started", [])
    run_of(tiny, [Started(step=0, world_size=1, time_s=1.0), Stopped(step=3, status="stopped", time_s=2.0)])
    assert run.status == "stopped"
    run_of(tiny, [Started(step=3, world_size=2, time_s=3.0)])
    assert run.status == "running or killed"
    assert [one.world_size for one in run.starts] == [1, 2]


def test_a_handle_reads_the_steps_as_columns(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start asks whether the run has finished: a million steps as events take a minute and a gigabyte."""
    text = Sampled(step=4, prompt="To ", text="be", time_s=5.0)
    told: list[Event] = [Started(step=0, world_size=1, time_s=1.0), *(step(number) for number in range(1, 5)), text]
    run = run_of(tiny, [*told, Stopped(step=4, status="finished", time_s=6.0)])
    with (Path(run.folder.where("journal")) / "0001-0000.jsonl").open("a") as journal:
        journal.write('{"kind": "of_a_newer_version", "format": 1, "time_s": 7.0, "term": 1}\n')

    def parsed(record: dict[str, object]) -> Event:
        assert record["kind"] != "step"
        return event(record)

    monkeypatch.setattr("springtide.tracking.journal.event", parsed)
    assert (run.finished, run.status, run.last_step, run.sample) == (True, "finished", 4, "To be")
    assert not run.has_nothing_left(tiny)
    assert ([one.step for one in run.starts], run.evaluations) == ([0], [])
    run_of(tiny, [Started(step=2, world_size=1, time_s=8.0)])
    assert (run.finished, run.status, run.last_step) == (True, "running or killed", 4)


def test_a_run_without_steps_does_not_verify_and_says_so_in_the_keys_of_the_command(tiny: Config) -> None:
    found = run_of(tiny, []).verify()
    assert not found.ok
    shown = found.as_dict()
    counts = ["steps_checked", "steps_trained_again", "steps_abandoned"]
    first = ["ok", "run", "order_identity", *counts, "loss_max_abs_diff", "world_sizes"]
    wrong = ["missing", "mismatches", "token_mismatches", "chain_mismatches"]
    proven = ["steps_proven_by_chain", "steps_proven_by_chain_alone", "checkpoints_checked", "checkpoints_unread"]
    assert list(shown) == [*first, "goes_on_from", "corpora", *wrong, *proven]
    assert shown["corpora"] == {"corpus": {"rows": 0, "epochs": 0.0}}
