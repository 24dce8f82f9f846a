"""What a resumed sweep reads of its trials."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from springtide import config as configs
from springtide.api.sweep import SweepReader
from springtide.events import Evaluated, Event, Started, Stopped
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.tracking.journal import Journal
from springtide.tracking.ledger import Prices
from springtide.tune import Chosen, SweepFolder, TrialEnd, member_config, name_of, read, with_takeover

TINY = configs.recipes.tiny()
STEP = TINY.tokens_per_step
TABLE = read(
    {
        "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1), "optim.warmup": ("uniform", 0, 10)},
        "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
        "BUDGET": {"trials": 4, "tokens_per_trial": 40 * STEP, "rungs": 4},
    },
    TINY,
)
POINTS = [{"optim.peak_lr": rate, "optim.warmup": 3} for rate in (0.01, 0.02)]


@pytest.fixture
def reader(tmp_path: Path) -> SweepReader:
    return SweepReader(SweepFolder(Folder(tmp_path)), TABLE, Prices())


def happens(reader: SweepReader, number: int, *events: Event) -> None:
    """Add ``events`` to the run of a trial."""
    run = reader.folder.trials / name_of(number)
    if not run.exists(configs.RUN_CONFIG):
        config = member_config(TINY, TABLE.budget, name_of(number), POINTS[number], "")
        run.write(configs.RUN_CONFIG, configs.dump(config))
    with Journal(run) as journal:
        for event in events:
            journal(event)


def at(step: int) -> Event:
    return Evaluated(step=step, heldout_loss=2.0, heldout_bits_per_byte=1.0, rows=1)


def test_a_rung_that_nobody_has_continued_from_is_reported_again(reader: SweepReader) -> None:
    """Its driver was killed before it decided who takes over whose state."""
    assert reader.last_settled_rung([]) == reader.last_settled_rung(POINTS) == 0
    happens(reader, 0, Started(step=0, world_size=1), at(10))
    happens(reader, 1, Started(step=0, world_size=2))
    assert reader.last_settled_rung(POINTS) == 0
    happens(reader, 1, at(10))
    assert reader.last_settled_rung(POINTS) == 0
    happens(reader, 1, Started(step=11, world_size=2))
    assert reader.last_settled_rung(POINTS) == 10
    happens(reader, 0, Started(step=11, world_size=2), at(20))
    happens(reader, 1, at(20))
    assert reader.last_settled_rung(POINTS) == 10
    donor = f"{reader.folder.url}/trials/trial-0001/checkpoints/step-0000000020"
    reader.folder.write_lineage(0, with_takeover(0, reader.folder.lineage(0, POINTS[0]), POINTS[1], donor))
    assert reader.last_settled_rung(POINTS) == 20


def test_a_resumed_sweep_reads_the_dataset_of_its_trials(reader: SweepReader) -> None:
    """The first trial's config that can be read names it."""
    assert reader.begun() is None
    for number, point in enumerate(POINTS):
        reader.folder.write_point(number, point)
        happens(reader, number, Started(step=0, world_size=1))
    assert reader.begun() == Run(reader.folder.trials / name_of(0)).config
    (reader.folder.trials / name_of(0)).write(configs.RUN_CONFIG, b"model: [")
    assert reader.begun() == Run(reader.folder.trials / name_of(1)).config


def test_an_outcome_is_that_of_the_folder(reader: SweepReader) -> None:
    for number, point in enumerate(POINTS):
        reader.folder.write_point(number, point)
    happens(reader, 0, Started(step=0, world_size=1), at(10))
    running, waiting = reader.outcomes()
    assert (running.status, running.value, running.tokens) == ("stopped", 2.0, 10 * STEP)
    assert (waiting.status, waiting.tokens, waiting.repeats) == ("waiting", 0, -1)
    assert (running.reason, waiting.reason) == ("interrupted at step 0, can be resumed", "")
    assert math.isnan(waiting.value)
    assert reader.interrupted([running, waiting]) == ["trial-0000", "trial-0001"]
    reader.folder.write_end(0, TrialEnd("stopped", ""))
    happens(reader, 1, Started(step=0, world_size=1), Stopped(step=0, status="failed", reason="no memory"))
    assert [(one.status, one.reason) for one in reader.outcomes()] == [("stopped", ""), ("failed", "no memory")]
    assert reader.interrupted(reader.outcomes()) == ["trial-0001"], "a store that stayed away ends a run, not its trial"
    reader.folder.write_end(1, TrialEnd("failed", "no memory"))
    happens(reader, 0, Stopped(step=40, status="finished", reason=""))
    assert reader.interrupted(reader.outcomes()) == []


def test_a_repeat_is_of_the_finalist_that_it_was_begun_for(reader: SweepReader) -> None:
    """Whatever budget the sweep is read with."""
    for number in range(8):
        reader.folder.write_point(number, POINTS[0])
    repeats = [-1, -1, -1, -1, 3, 3, 1, 1]
    reader.folder.write_finalists(Chosen([3, 1], trials=4, seeds=3))
    for trials, seeds in ((4, 3), (16, 3), (2, 2)):
        budget = dataclasses.replace(TABLE.budget, trials=trials, seeds=seeds)
        other = dataclasses.replace(reader, table=dataclasses.replace(TABLE, budget=budget))
        assert [one.repeats for one in other.outcomes()] == repeats
    reader.folder.root.write_json(
        "finalists.json", [3, 1]
    )  # from before the numbers: by the budget of 4 trials, 3 seeds
    assert [one.repeats for one in reader.outcomes()] == repeats
