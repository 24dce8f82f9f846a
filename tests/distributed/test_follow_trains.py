"""A run takes up datasets at a step told ahead: it is the run that knew of them from the start, at any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from following import arrive, config_of
from loops import train

from springtide.app.follow import follow
from springtide.config import RUN_CONFIG, Config
from springtide.config.steps import OrderStep, StepsDone
from springtide.errors import ConfigError
from springtide.events import StepDone
from springtide.run.find import find_run
from springtide.run.folder import Run
from springtide.run.take_up import followed, read_take_ups, write_take_up
from springtide.stream import open_data
from springtide.stream.sample_ids import corpus_and_row
from springtide.track.journal import Journal

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
STEPS = 8


class World:
    """A folder that text arrives in, and a run that follows it."""

    def __init__(self, root: Path, tiny: Config) -> None:
        self.source, self.root, self.batches = root / "text", root / "sets", 0
        self.arrive()
        shards = config_of(self.source, self.root).shards.model_dump(exclude={"root"})
        fixed: dict[str, Any] = {f"shards.{name}": value for name, value in shards.items()}
        fixed |= {"stream.follow": str(self.root), "run.root": str(root), "run.id": "mine", "shards.dataset": ""}
        fixed |= {"parallel.reduction": "fp64", "stream.lanes": 6, "train.eval_tokens": 0, "optim.warmup": 0}
        fixed |= {"stream.max_epochs": 100.0, "checkpoint.every_steps": 3}
        config = tiny.override(fixed)
        self.given = config.override({"train.total": STEPS * config.tokens_per_step, "stream.window": 64})

    def arrive(self) -> None:
        arrive(self.source, f"batch-{self.batches}", self.batches)
        list(follow(config_of(self.source, self.root), once=True, at_least_bytes=1, wait=lambda _: None))
        self.batches += 1

    def start(self, resume: bool) -> tuple[Config, Run]:
        """As the start of a run: decide, then write down what was decided."""
        config, run = find_run(self.given, resume, False)
        config, record = followed(config, run)
        if record is not None:
            write_take_up(run.folder, record)
        run.write_config(config)
        return config, run


def losses(run: Run, events: list[Any]) -> dict[int, float]:
    """Those of the steps; they go into the run's journal, too."""
    done = [event for event in events if isinstance(event, StepDone)]
    with Journal(run.folder) as journal:
        for event in done:
            journal(event)
    return {event.step: event.loss for event in done}


def test_new_text_is_read_from_a_step_on_that_the_record_names(tmp_path: Path, tiny: Config, ranks: Ranks) -> None:
    world = World(tmp_path, tiny)
    config, run = world.start(resume=False)
    before = open_data(config.data)
    assert ([one.from_step for one in read_take_ups(run.folder)], before.names) == ([0], ("followed-0000",))
    found = losses(run, ranks(2, train, config, 3)[0])
    world.arrive()
    config, run = world.start(resume=True)
    [_, record] = read_take_ups(run.folder)
    after = open_data(config.data)
    assert (record.from_step, after.names) == (3, ("followed-0000", "followed-0001"))
    assert before.order.identity_at(StepsDone(3)) == after.order.identity_at(StepsDone(3))
    assert before.order.identity_at(StepsDone(4)) != after.order.identity_at(StepsDone(4))
    for step in map(OrderStep, range(STEPS)):
        batch = after.order.batch(step)
        shares = [np.concatenate([after.order.rank_batch(step, rank, size) for rank in range(size)]) for size in (2, 3)]
        assert all(np.array_equal(one, batch) for one in shares)
        assert (1 in corpus_and_row(batch)[0]) == (step >= 3)
        assert step >= 3 or np.array_equal(batch, before.order.batch(step))
    assert world.start(resume=True)[0] == config, "a start without new text changes nothing"
    saved = Run(run.folder).config
    assert followed(saved, run) == (saved, None), "nor does a start from what was written down"
    found |= losses(run, ranks(3, train, config)[0])
    whole = config.override({"run.id": "whole"})
    assert found == {one.step: one.loss for one in ranks(1, train, whole)[0] if isinstance(one, StepDone)}
    assert run.folder.exists(RUN_CONFIG)


def test_what_cannot_be_taken_up_is_refused_by_name(tmp_path: Path, tiny: Config) -> None:
    world = World(tmp_path, tiny)
    run = Run(find_run(world.given, False, False)[1].folder)
    later = [{"shares": {"followed-0000": 1}}, {"from_step": 2, "shares": {"followed-0000": 1}}]
    for changes, said in (
        ({"stream.follow": str(tmp_path / "none")}, "has no dataset yet, and the config names none"),
        ({"stream.epoch_caps": {"followed-0000": 2}}, "are computed for all steps before the first"),
        ({"stream.weights": later}, "begins later than the run"),
    ):
        with pytest.raises(ConfigError, match=said):
            followed(world.given.override(changes), run)
    config, run = world.start(resume=False)
    assert followed(config.override({"stream.follow": ""}), run)[1] is None
    [record] = read_take_ups(run.folder)
    [url] = record.datasets.values()
    manifest = Path(url) / "manifest.json"
    other = record.model_copy(update={"number": 1, "digests": {"followed-0000": "0" * 32}})
    write_take_up(run.folder, other)
    with pytest.raises(ConfigError, match="is not the dataset that mine reads as followed-0000"):
        followed(config, run)
    with pytest.raises(FileExistsError):
        write_take_up(run.folder, other)
    assert manifest.exists()
