"""A device that computes wrong results, and raises nothing, is found, named and undone; an honest one is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loops import train_with_dropout
from prepared import short_run
from wrong_results import LOW_BIT, in_turn, train_with_flips

from springtide import config as configs
from springtide.checkpoint.format import committed
from springtide.config import Config
from springtide.events import Event, Miscomputed, Started, StepDone, Warned
from springtide.run.verify import verify
from springtide.storage import Folder
from springtide.tracking.journal import read_journal
from springtide.tracking.ledger import ledger

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
STEPS = 20


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Twenty steps that take no time, with a checkpoint every five, and checks as often as can be."""
    root = tmp_path_factory.mktemp("recheck")
    often = {"checkpoint__every_steps": 5, "elastic__recheck": 1e-6}
    return short_run(root, STEPS, train__sample_tokens=0, elastic__max_workers=4, **often)


def named(config: Config, name: str, **changes: Any) -> Config:
    return config.override({"run.id": name, **{key.replace("__", "."): value for key, value in changes.items()}})


def losses(events: list[Event]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, StepDone)}


def test_a_device_that_lies_is_named_and_the_run_goes_on_from_before_it_lied(config: Config, ranks: Ranks) -> None:
    """Only the newest checkpoint would be kept, were others not needed in case of a lie."""
    exact = named(config, "lies", parallel__reduction="fp64", checkpoint__keep_last=1)
    lies = {"wrong": [1], "since": 8, "bits": LOW_BIT, "checked": [7, 17]}
    clean = (named(exact, "clean"), {"checked": []})
    for (expected, _), (events, said), (again, end) in ranks(
        3, in_turn, clean, (exact, lies), (exact, {"checked": []})
    ):
        [told] = [event for event in events if isinstance(event, Miscomputed)]
        assert (told.step, told.ranks, told.nodes, told.agreed_step) == (17, [1], ["node-1"], 6)
        assert "2 of 3 ranks agree" in told.reason
        assert said.startswith("UnfitNode: step 17: rank 1 on node node-1")
        assert said.endswith("(node-1)")
        assert losses(events)[17] != losses(expected)[17]
        started = again[0]
        assert isinstance(started, Started)
        assert (started.step, started.resumed_from, end) == (5, "step-0000000005", "")
        assert losses(again) == {step: loss for step, loss in losses(expected).items() if step > 5}
    folder = Folder(exact.run.root) / "lies"
    # the one that it resumed from is known to be good, though that was checked after it was saved
    assert committed(folder) == ["step-0000000005", "step-0000000020"]
    folder.write("config.yaml", configs.dump(exact))
    assert verify(folder).ok
    [restart] = ledger(read_journal(folder)).restarts
    assert restart.steps_lost == 12


def test_of_two_devices_one_that_contradicts_itself_is_named(config: Config, ranks: Ranks) -> None:
    for events, said in ranks(2, train_with_flips, named(config, "random"), [0], 8, 1 << 26, False):
        [told] = [event for event in events if isinstance(event, Miscomputed)]
        assert (told.step, told.ranks) == (8, [0])
        assert said.startswith("UnfitNode")
        assert "twice with different results" in said


def test_of_two_devices_that_repeat_themselves_none_is_named_and_the_run_goes_back(
    config: Config, ranks: Ranks
) -> None:
    changed = named(config, "undecided")
    for events, said in ranks(2, train_with_flips, changed, [0], 8):
        [told] = [event for event in events if isinstance(event, Miscomputed)]
        assert (told.step, told.ranks, told.nodes, told.agreed_step) == (8, [], ["node-0", "node-1"], 5)
        assert said.startswith(
            "DevicesDisagree: step 8: rank 0 on node node-0 and rank 1 on node node-1 compute different"
        )
    assert committed(Folder(changed.run.root) / "undecided") == ["step-0000000005"]


def test_if_every_checkpoint_is_from_after_the_last_agreement_the_run_does_not_begin_again_by_itself(
    config: Config, ranks: Ranks
) -> None:
    late = named(config, "late")
    lies = {"wrong": [1], "since": 3, "checked": [2, 8]}
    with pytest.raises(
        AssertionError, match=r"CheckpointError: .* has committed checkpoints before, and none of them counts"
    ):
        ranks(3, in_turn, (late, lies), (late, {}))
    assert committed(Folder(late.run.root) / "late") == []


@pytest.mark.full
def test_a_model_that_draws_its_own_numbers_is_not_checked_and_says_so(config: Config, ranks: Ranks) -> None:
    for events, said in ranks(2, train_with_flips, named(config, "own"), [0, 1], 8, 1 << 26, False):
        assert said == ""
        [told] = [event for event in events if isinstance(event, Warned)]
        assert told.step == 8
        assert "elastic.recheck is off" in told.reason
        assert len(losses(events)) == STEPS


@pytest.mark.full
def test_numbers_that_are_seeded_at_each_step_are_drawn_alike_on_another_rank(config: Config, ranks: Ranks) -> None:
    short = {"train__total": 8 * 12 * 64, "optim__warmup": 0}
    events = ranks(2, train_with_dropout, named(config, "dropout", **short))[0]
    assert not [event for event in events if isinstance(event, Miscomputed | Warned)]
    others = ranks(2, train_with_dropout, named(config, "unchecked", elastic__recheck=0.0, **short))[0]
    assert losses(events) == losses(others)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        pytest.param(2, {"strategy": "ddp"}, marks=pytest.mark.full),
        (3, {"strategy": "zero1", "reduction": "fp64"}),
        pytest.param(2, {"strategy": "zero2", "precision": "bf16", "recompute": "selective"}, marks=pytest.mark.full),
        pytest.param(4, {"strategy": "zero3", "shard_workers": 2}, marks=pytest.mark.full),
        pytest.param(2, {"strategy": "zero3", "precision": "fp16", "recompute": "full"}, marks=pytest.mark.full),
    ],
)
def test_honest_devices_agree_and_learn_the_same_bits_with_and_without_checks(
    config: Config, ranks: Ranks, world_size: int, changes: dict[str, Any]
) -> None:
    parallel = {f"parallel__{key}": value for key, value in changes.items()}
    short = {"train__total": 8 * 12 * 64, "optim__warmup": 0, "elastic__min_workers": 4}
    short |= {"checkpoint__every_steps": 0, "checkpoint__stage": ""}
    name = "-".join(map(str, changes.values()))
    checked = named(config, name, **parallel, **short)
    unchecked = named(checked, f"{name}-unchecked", elastic__recheck=0.0)
    for (events, said), (others, _) in ranks(world_size, in_turn, (checked, {}), (unchecked, {})):
        assert said == ""
        assert not [event for event in events if isinstance(event, Miscomputed | Warned)]
        assert len(losses(events)) == 8
        assert losses(events) == losses(others)
