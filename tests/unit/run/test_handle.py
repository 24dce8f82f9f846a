"""What a handle says of a run, from its journal alone."""

from __future__ import annotations

from springtide.config import Config
from springtide.events import Event, Started, Stopped
from springtide.run.folder import Run
from springtide.store import Folder
from springtide.track.journal import Journal


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
