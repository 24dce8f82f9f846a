"""A run that begins with a checkpoint of another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
from loops import train, train_poisoned
from ranks import run_here

from springtide import config as configs
from springtide.checkpoint import branch, leases
from springtide.checkpoint.format import committed, read_manifest
from springtide.checkpoint.fresh_start import begin_from_scratch
from springtide.config import Config
from springtide.errors import ConfigError
from springtide.events import Evaluated, Event, RolledBack, Started, StepDone
from springtide.run.find import find_run
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.training.start_check import check_start

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]


def trunk(tiny: Config, name: str, steps: int = 60, decay: int = 20, **changes: Any) -> Config:
    """Of a rate that is stable from step 4 until it decays to nothing."""
    step = tiny.tokens_per_step
    fixed = {"run.id": name, "optim.schedule": "wsd", "optim.warmup": 4 * step, "optim.final_lr_ratio": 0.0}
    fixed |= {"train.total": steps * step, "optim.decay": decay * step, "checkpoint.every_steps": 10}
    fixed |= {"checkpoint.keep_last": 1, "checkpoint.when_busy": "queue", "train.eval_tokens": 0}
    fixed |= {"elastic.recheck": 0}  # what was checked last would be kept, too
    return tiny.override({**fixed, **{key.replace("__", "."): value for key, value in changes.items()}})


def begun(config: Config) -> Config:
    """As the driver does: claimed, what it begins with found, checked and held."""
    config, run = find_run(config, resume=False, accept_changes=False)
    data = open_data(config.data)
    check_start(config, data.order.identity_at, data.tokenizer_digest)
    branch.keep(config.train.start_from, run.id)
    run.folder.write(configs.RUN_CONFIG, configs.dump(config))
    return config


def steps(events: list[Event]) -> dict[int, StepDone]:
    return {event.step: event for event in events if isinstance(event, StepDone)}


@pytest.mark.full
def test_a_branch_that_decays_is_the_run_that_would_have_and_the_trunk_goes_on(tiny: Config, ranks: Ranks) -> None:
    main = trunk(tiny, "main", parallel__reduction="fp64", checkpoint__stage="/dev/shm")
    ranks(2, train, main, 30)
    twin = trunk(tiny, "twin", steps=40, decay=10, parallel__reduction="fp64")
    expected = steps(ranks(1, train, twin)[0])

    asked = trunk(tiny, "branch", 40, 10, train__start_from=f"{tiny.run.root}/main", parallel__reduction="fp64")
    config = begun(asked)
    assert config.train.start_from.endswith("main/checkpoints/step-0000000030")
    events = ranks(3, train, config)[0]
    [started] = [event for event in events if isinstance(event, Started)]
    assert (started.step, started.resumed_from) == (30, config.train.start_from)
    found = steps(events)
    assert sorted(found) == list(range(31, 41))
    assert found[40].learning_rate == 0.0
    for step, done in found.items():
        assert (done.loss, done.learning_rate, done.digest) == (
            expected[step].loss,
            expected[step].learning_rate,
            expected[step].digest,
        )

    chains = [read_manifest(Folder(tiny.run.root) / name, "step-0000000040").meta.chain for name in ("branch", "twin")]
    assert chains[0] == chains[1]

    # what a branch begins with stays, however few the trunk keeps, until it has a checkpoint of its own; and after
    assert sorted(steps(ranks(1, train, main)[0])) == list(range(31, 61))
    folder = Folder(tiny.run.root)
    assert committed(folder / "main") == ["step-0000000030", "step-0000000060"]
    shutil.rmtree((folder / "branch" / "checkpoints").path)
    with pytest.raises(AssertionError, match=r"has committed checkpoints before.*--from-scratch"):
        ranks(2, train, config)
    user = leases.claim(folder / "branch", "user", trains=False).term
    begin_from_scratch(folder / "branch", user)
    leases.end(folder / "branch", user)
    again = ranks(2, train, config)[0]
    assert {step: done.loss for step, done in steps(again).items()} == {step: done.loss for step, done in found.items()}
    # one who resumes means the checkpoint that was begun with, not the newest of now
    assert find_run(asked, resume=True, accept_changes=False)[0].train.start_from == config.train.start_from


def test_a_spike_soon_after_the_branch_point_skips_no_step_of_the_trunk(tiny: Config) -> None:
    run_here(train, trunk(tiny, "stem", steps=20, decay=0))
    spiked = trunk(tiny, "spiked", 24, 0, train__start_from=f"{tiny.run.root}/stem", optim__on_spike="rollback")
    config = begun(spiked.override({"optim.rollback_steps": 5, "checkpoint.stage": "/dev/shm"}))
    events = run_here(train_poisoned, config, {22})
    assert [event.skipped for event in events if isinstance(event, RolledBack)] == [[20, 21]]
    assert [event.step for event in events if isinstance(event, Started)] == [20, 20]
    assert configs.parse((Folder(tiny.run.root) / "spiked").read(configs.RUN_CONFIG)).stream.skip == (20, 21)
    assert sorted(steps(events)) == [21, 22, 23, 24]


def test_weights_alone_begin_at_step_0_of_any_order_and_what_cannot_be_begun_with_is_told(
    tiny: Config, ranks: Ranks
) -> None:
    events = run_here(train, trunk(tiny, "trained", steps=20, decay=0, train__eval_tokens=16 * 64))
    after = [event for event in events if isinstance(event, Evaluated)][-1]
    weights = {"train__start_from": f"{tiny.run.root}/trained", "train__start_with": "weights", "stream__seed": 5}
    digest = open_data(tiny.data).tokenizer_digest
    assert read_manifest(Folder(tiny.run.root) / "trained", "step-0000000020").meta.tokenizer_digest == digest
    config = begun(trunk(tiny, "tuned", steps=3, decay=0, train__eval_tokens=16 * 64, optim__warmup=0, **weights))
    events = ranks(2, train, config)[0]
    [started] = [event for event in events if isinstance(event, Started)]
    assert (started.step, started.chain) == (0, "")
    before = next(event for event in events if isinstance(event, Evaluated))
    assert (before.step, before.heldout_loss) == (0, pytest.approx(after.heldout_loss, abs=1e-5))
    found = steps(events)
    assert [(step, found[step].tokens) for step in (1, 3)] == [(1, tiny.tokens_per_step), (3, 3 * tiny.tokens_per_step)]
    # before anything starts
    here = f"{tiny.run.root}/trained"
    for changes, problem in (
        ({"train__start_from": f"{here}/checkpoints/step-0000000011"}, "names no checkpoint that counts"),
        ({"train__start_from": f"{tiny.run.root}/nowhere"}, "names no checkpoint that counts; .* has none"),
        (
            {"train__start_from": here, "stream__seed": 7},
            "was trained in the order .*start_with = optimizer or weights",
        ),
        ({"train__start_from": here, "steps": 20, "decay": 0}, "is of step 20, and train.total ends at step 20"),
    ):
        with pytest.raises(ConfigError, match=rf"train\.start_from = .*{problem}"):
            begun(trunk(tiny, "refused", **changes))
