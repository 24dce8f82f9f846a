"""World size, micro-batch and restarts drop out of the maths."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loops import (
    full_state,
    gradients,
    save_and_die,
    train,
    train_laid_out,
    train_with_a_slow_device,
    train_with_a_slow_feed,
    train_with_dropout,
)
from prepared import prepare
from ranks import RankDied, each, run_here

from springtide import config as configs
from springtide.checkpoint.format import committed, quarantine, read_manifest
from springtide.checkpoint.fresh_start import check_order
from springtide.cli.main import main
from springtide.config import Config
from springtide.config.steps import OrderStep
from springtide.errors import CheckpointError
from springtide.events import (
    Evaluated,
    Event,
    Saved,
    SaveFailed,
    Started,
    StepDone,
    Stopped,
    Straggling,
    Waited,
)
from springtide.model import build
from springtide.storage import Folder
from springtide.stream import digest, open_data
from springtide.stream.chain import next_chain

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
EVERY_FIVE = {"checkpoint__every_steps": 5, "checkpoint__when_busy": "queue", "checkpoint__stage": "/dev/shm"}


def named(config: Config, name: str, **changes: Any) -> Config:
    return config.override({"run.id": name, **{key.replace("__", "."): value for key, value in changes.items()}})


def steps(events: list[Event]) -> dict[int, StepDone]:
    return {event.step: event for event in events if isinstance(event, StepDone)}


def compare(found: dict[int, StepDone], expected: dict[int, StepDone], tolerance: float) -> None:
    assert found
    for step, done in found.items():
        assert done.digest == expected[step].digest
        assert done.tokens == expected[step].tokens
        assert done.loss == pytest.approx(expected[step].loss, abs=tolerance)
        assert done.grad_norm == pytest.approx(expected[step].grad_norm, rel=1e-3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_summed_gradient_is_that_of_the_mean_loss_over_the_whole_batch(
    tiny: Config, ranks: Ranks, world_size: int
) -> None:
    tokens = np.random.default_rng(0).integers(0, 257, (7, 33)).astype(np.uint16)  # 7 rows divide by no world size
    model = build(tiny.model, 257)
    rows = torch.from_numpy(tokens.astype(np.int64))
    F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
    calls: list[Any] = [
        (gradients, (named(tiny, "", parallel__reduction=reduction), tokens, micro_batch))
        for reduction in ("fp32", "fp64")
        for micro_batch in {1: (7, 3), 2: (2,), 3: (2,), 4: (1,)}[world_size]
    ]
    for of_rank in [run_here(each, calls)] if world_size == 1 else ranks(world_size, each, calls):
        for found in of_rank:
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found[name], parameter.grad, atol=2e-6, rtol=1e-4, msg=name)


@pytest.fixture(scope="module")
def baseline() -> dict[str, dict[int, StepDone]]:
    """The uninterrupted run in one process, trained by the first test that needs it."""
    return {}


def uninterrupted(tiny: Config, ranks: Ranks, baseline: dict[str, dict[int, StepDone]]) -> dict[int, StepDone]:
    if not baseline:
        [events] = ranks(1, train, named(tiny, "alone"))
        baseline["steps"] = steps(events)
        assert sorted(baseline["steps"]) == list(range(1, 61))
        before, after = [event for event in events if isinstance(event, Evaluated)]
        assert after.heldout_bits_per_byte < 0.7 * before.heldout_bits_per_byte
    return baseline["steps"]


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "micro_batch"), [(3, 4), (2, 8), (4, 1), (5, 2)])
def test_losses_are_equal_at_any_world_size(
    tiny: Config, ranks: Ranks, baseline: Any, world_size: int, micro_batch: int
) -> None:
    expected = uninterrupted(tiny, ranks, baseline)
    everyone = ranks(world_size, train, named(tiny, "many", train__micro_batch=micro_batch))
    for events in everyone:  # every rank holds the same opinion of the run
        compare(steps(events), expected, 5e-5)
        assert isinstance(events[-1], Stopped)


def test_a_run_resized_at_every_restart_has_the_bits_of_the_uninterrupted_one(tiny: Config, ranks: Ranks) -> None:
    changes = {"parallel__reduction": "fp64", "stream__lanes": 6, "train__eval_tokens": 0}
    exact = named(tiny, "exact", **changes, checkpoint__stage="/dev/shm")  # through the processes that write
    whole, state = steps(run_here(train, exact)), run_here(full_state, exact)
    assert sorted(whole) == list(range(1, 61))
    config, last, chains = named(exact, "resized"), 0, [""]
    folder = Folder(config.run.root) / "resized"
    for done in whole.values():
        chains.append(
            next_chain(chains[-1], OrderStep(done.step - 1), int(done.digest, 16), done.step_tokens, done.updated)
        )
    for world_size, stop_at in ((2, 13), (5, 27), (3, 40), (4, 0)):
        everyone = ranks(world_size, train, config, stop_at)
        started, stopped = everyone[0][0], everyone[0][-1]
        assert isinstance(started, Started)
        assert (started.step, started.world_size, started.chain) == (last, world_size, chains[last])
        for events in everyone:  # every rank holds the same opinion of the run
            compare(steps(events), whole, 0.0)
        assert isinstance(stopped, Stopped)
        last = stopped.step
        assert (stopped.status, last) == (("stopped", stop_at) if stop_at else ("finished", 60))
        assert read_manifest(folder, committed(folder)[-1]).meta.chain == chains[last]
    for name, tensor in ranks(2, full_state, config)[0].items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize(
    "copies", [3, pytest.param(5, marks=pytest.mark.full), pytest.param(6, marks=pytest.mark.full)]
)
def test_gradient_norm_of_several_copies_is_exact(tiny: Config, ranks: Ranks, copies: int) -> None:
    """A sum of N shares of 1/N is inexact for 3, 5 and 6 copies: the last bit of the norm differed in one step of 19."""
    exact = {"parallel__strategy": "ddp", "parallel__reduction": "fp64", "stream__lanes": 6, "train__eval_tokens": 0}
    two = steps(ranks(2, train_laid_out, named(tiny, "two", **exact))[0])
    for step, done in steps(ranks(copies, train_laid_out, named(tiny, "more", **exact))[0]).items():
        assert (done.loss, done.grad_norm) == (two[step].loss, two[step].grad_norm), f"step {step}"


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 5])
def test_dropout_does_not_depend_on_the_world_size(tiny: Config, ranks: Ranks, world_size: int) -> None:
    """Generators are seeded by step and lane. numpy's and Python's count, too."""
    exact = named(tiny, "drop", parallel__reduction="fp64", stream__lanes=6, train__eval_tokens=0, optim__warmup=0)
    exact = named(exact, "drop-1", train__total=6 * exact.tokens_per_step)
    alone = steps(ranks(1, train_with_dropout, exact)[0])
    found = steps(ranks(world_size, train_with_dropout, named(exact, "many"))[0])  # of six lanes
    assert [one.loss for one in found.values()] == [one.loss for one in alone.values()]


@pytest.mark.full
def test_batches_that_grow_are_the_same_at_any_world_size(tiny: Config, ranks: Ranks) -> None:
    length = tiny.shards.sequence_length
    ramp = [{"rows": 4, "until_tokens": 4 * length * 6}, {"rows": 8, "until_tokens": 4 * length * 6 + 8 * length * 4}]
    config = named(tiny, "grown", stream__lanes=4, stream__ramp=ramp, parallel__reduction="fp64", train__eval_tokens=0)
    config = config.override({"train.total": length * (4 * 6 + 8 * 4 + 12 * 5), "optim.warmup": 16 * length})
    expected = steps(ranks(1, train, config)[0])
    assert [one.step_tokens // length for one in expected.values()] == [4] * 6 + [8] * 4 + [12] * 5
    assert expected[4].learning_rate == config.optim.peak_lr  # in tokens, however small the steps
    resized = named(config, "resized")
    found = {**steps(ranks(3, train, resized, 5)[0]), **steps(ranks(2, train, resized, 11)[0])}
    found |= steps(ranks(4, train, resized)[0])
    assert found.keys() == expected.keys()
    for step, one in found.items():
        assert (one.digest, one.tokens, one.loss) == (expected[step].digest, expected[step].tokens, expected[step].loss)


@pytest.mark.full
def test_fitted_documents_train_alike_at_any_world_size(tiny: Config, ranks: Ranks, poems: str, datasets: Path) -> None:
    """Rows hold different numbers of tokens that count, so only a token-weighted loss is right."""
    changes = {"shards.packing": "best_fit", "shards.mask_across_documents": True, "shards.dataset": ""}
    config = prepare(
        tiny.override({**changes, "corpus.source": str(datasets / "parts"), "corpus.near_duplicates": False})
    )
    config = named(config, "fitted", train__total=12 * 64 * 15, optim__warmup=0, checkpoint__every_steps=0)
    [alone] = ranks(1, train, config)
    counts = [done.step_tokens for done in steps(alone).values()]
    assert len(set(counts)) > 1
    assert min(counts) < 12 * 64
    compare(steps(ranks(3, train, named(config, "fitted-3", train__micro_batch=1))[0]), steps(alone), 5e-5)


def test_every_rank_is_told_who_waited_for_data(tiny: Config, ranks: Ranks) -> None:
    config = named(tiny, "slow", train__total=tiny.tokens_per_step * 10, optim__warmup=0, **EVERY_FIVE)
    for events in ranks(3, train_with_a_slow_feed, config, 1, 0.2):
        waited = [event for event in events if isinstance(event, Waited)]
        assert [event.step for event in waited] == [5, 10]
        fast, slow, last = waited[-1].data_waits_s
        assert slow >= 10 * 0.2
        assert slow > max(fast, last)  # by how much, a busy machine has a say in
        assert all(step.data_wait_s >= 0.2 for step in steps(events).values())


@pytest.mark.full
def test_a_rank_that_holds_up_the_others_is_named_once_with_its_node(tiny: Config, ranks: Ranks) -> None:
    config = named(tiny, "straggler", train__total=tiny.tokens_per_step * 24, optim__warmup=0, elastic__compare=0.1)
    for events in ranks(3, train_with_a_slow_device, config, 1, ["a", "b", "c"]):
        # on a busy machine another rank may be slow, too
        [straggler] = [event for event in events if isinstance(event, Straggling) and event.rank == 1]
        assert straggler.node == "b"
        assert straggler.share < 0.6


@pytest.mark.full
@pytest.mark.parametrize("load_on", [1, 2, 3, 8])
def test_a_checkpoint_of_four_ranks_is_bit_equal_on_any_number(tiny: Config, ranks: Ranks, load_on: int) -> None:
    short = {"train__total": 12 * 64 * 3, "optim__warmup": 0, "train__eval_tokens": 0}
    config = named(tiny, "reshard", **short, checkpoint__stage="/dev/shm")
    ranks(4, train, config)
    expected = ranks(4, full_state, config)[0]
    for found in ranks(load_on, full_state, config):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "point",
    [
        "one of two",
        *(pytest.param(one, marks=pytest.mark.full) for one in ("before staging", "staging", "handed over")),
    ],
)
def test_trainers_killed_at_any_point_of_a_save_go_on_from_a_good_checkpoint(
    tiny: Config, ranks: Ranks, point: str
) -> None:
    config = named(tiny, "killed", train__total=12 * 64 * 12, optim__warmup=0, **EVERY_FIVE)
    with pytest.raises((RankDied, AssertionError)):  # one that outlives the other complains of the connection
        ranks(2, save_and_die, config, point)
    events = ranks(3, train, config)[0]
    assert isinstance(events[0], Started)
    # what was handed over is written and committed by the writing processes, unless the next lease was faster
    after = {"step-0000000005", "step-0000000010"} if point == "handed over" else {"step-0000000005"}
    assert events[0].resumed_from in after
    assert committed(Folder(config.run.root) / "killed")[-3:] == [f"step-{step:010d}" for step in (5, 10, 12)]


@pytest.mark.full
def test_a_writing_process_that_is_killed_costs_one_save_and_says_so(tiny: Config, ranks: Ranks) -> None:
    config = named(tiny, "unwritten", train__total=12 * 64 * 60, **EVERY_FIVE)
    [events, _] = ranks(2, save_and_die, config, "writer")
    [failure] = [event for event in events if isinstance(event, SaveFailed)]
    assert failure.step == 10
    assert "rank 1: the writer process ended with status -9" in failure.reason
    saved = [event.step for event in events if isinstance(event, Saved)]
    assert 10 not in saved
    assert saved[-1] == 60
    assert committed(Folder(config.run.root) / "unwritten")[-1] == "step-0000000060"


def test_another_order_is_refused_and_skipping_steps_that_are_done_goes_back_to_before_them(
    tiny: Config, ranks: Ranks
) -> None:
    config = named(tiny, "skips", train__total=12 * 64 * 12, optim__warmup=0, train__eval_tokens=0, **EVERY_FIVE)
    run_here(train, config)
    folder = Folder(config.run.root) / "skips"
    folder.write("config.yaml", configs.dump(config))
    skipping = config.override({"stream.skip": [7, 20]})
    identity = open_data(skipping.data).order.identity_at
    with pytest.raises(CheckpointError, match=r"step-0000000012 .* other weights or skips of steps that are done"):
        check_order(folder, identity, go_back=False)
    assert len(committed(folder)) == 3
    check_order(folder, identity, go_back=True)
    assert committed(folder) == ["step-0000000005"]
    events = ranks(2, train, skipping)[0]
    folder.write("config.yaml", configs.dump(skipping))
    assert isinstance(events[0], Started)
    assert events[0].step == 5
    assert committed(folder) == ["step-0000000005", "step-0000000010", "step-0000000012"]
    plain, found = open_data(config.data).order, steps(events)
    assert [found[step].digest for step in (7, 8, 12)] == [f"{digest(plain.batch(step)):016x}" for step in (6, 8, 12)]
    with pytest.raises(CheckpointError, match="was trained in the order"):
        run_here(train, config.override({"stream.seed": 1}))


def test_a_run_lives_in_object_storage_from_first_step_to_resume(tiny: Config, ranks: Ranks, s3: str) -> None:
    config = named(tiny, "remote", run__root=f"{s3}/runs", **EVERY_FIVE, train__total=12 * 64 * 20)
    expected = steps(run_here(train, named(config, "local", run__root=tiny.run.root, checkpoint__stage="")))
    events = ranks(2, train, config, 12)[0]
    compare(steps(events), expected, 5e-5)
    events = ranks(3, train, config)[0]
    assert isinstance(events[0], Started)
    assert events[0].step == 12
    compare(steps(events), expected, 5e-5)
    assert committed(Folder(config.run.root) / "remote") == [f"step-{step:010d}" for step in (12, 15, 20)]


def test_inspect_lists_checkpoints_and_says_why_one_is_rejected(
    tiny: Config, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    config = named(tiny, "inspected", train__total=12 * 64 * 12, optim__warmup=0, train__eval_tokens=0, **EVERY_FIVE)
    ranks(2, train, config)
    folder = Folder(config.run.root) / "inspected"
    folder.write("config.yaml", configs.dump(config))
    assert main(["inspect", folder.url, "--verify"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"step-0000000005: committed, 1\.2 MiB, world size 2, \d+ s old, verified", shown)
    one = folder.url + "/checkpoints/step-0000000010"
    file = next(Path(one).glob("*r0001.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main(["inspect", one]) == 0  # what does not read the bytes cannot know
    assert main(["inspect", one, "--verify"]) == 1
    assert re.search(rf"step-0000000010: bad, .*{file.name}.* digest expected", capsys.readouterr().out)
    quarantine(folder, "step-0000000010", "a bit flipped")
    assert main(["inspect", folder.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(item["step"], item["state"], item["problem"]) for item in found] == [
        (5, "committed", ""),
        (10, "quarantined", "a bit flipped"),
        (12, "committed", ""),
    ]
    assert main(["inspect", folder.url + "/checkpoints/step-0000000011"]) == 2
