"""Blocks are compiled for one shape: that of the rehearsal, of every micro-batch however uneven, and of the next group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch._dynamo.utils import counters

from springtide.config import Config
from springtide.distributed import compiled
from springtide.distributed.compiled import gave_up
from springtide.events import Evaluated, Event, StepDone, Warned
from springtide.storage import Folder
from springtide.stream import Batch, RankReader, load, open_data
from springtide.training import TrainLoop
from springtide.training.preflight import _alone, preflight

pytestmark = pytest.mark.processes


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """How many functions Dynamo has compiled so far; they run as they are."""
    dynamo.reset()
    counters.clear()
    with dynamo.config.patch(recompile_limit=8), torch.compiler.set_stance("default", force_backend="eager"):
        yield lambda: counters["frames"]["total"]
    dynamo.reset()
    counters.clear()


def uneven(tiny: Config, **changes: Any) -> Config:
    """9 rows a step, at most 5 of them at once: 4 and 5; 16 held-out rows: 5, 5, 5 and 1."""
    dotted = {
        "stream.global_batch": 9,
        "train.micro_batch": 5,
        "train.total": 9 * 64 * 3,
        "train.sample_tokens": 8,
        "optim.warmup": 9 * 64,
        "elastic.max_workers": 1,
        "parallel.precision": "bf16",
        "parallel.recompute": "selective",
    }
    return tiny.override(dotted | changes)


def events(config: Config, name: str) -> list[Event]:
    """Of a group of one worker."""

    def feed(reader: RankReader, step: int) -> Iterator[Batch]:
        return load(reader, reader.plan(step, config.num_steps, 2**16))

    config = config.override({"run.id": name})
    with _alone("cpu") as here:
        run = TrainLoop(config, here, open_data(config.data), Folder(config.run.root) / name)
        return list(run.events(feed, lambda: None))


def test_one_graph_trains_and_one_evaluates_in_every_group(tiny: Config, graphs: Callable[[], int]) -> None:
    config = uneven(tiny, **{"parallel.compile": True})
    preflight(config)
    rehearsed = graphs()
    assert rehearsed > 0
    found = events(config, "first")
    assert graphs() == rehearsed + 1  # evaluation's has no gradients; the sample's shapes have none
    again = events(config, "second")
    assert graphs() == rehearsed + 1
    assert not any(isinstance(event, Warned) for event in found + again)
    plain = events(uneven(tiny), "plain")
    for kind in (StepDone, Evaluated):
        ours, theirs = ([event for event in run if isinstance(event, kind)] for run in (found, plain))
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(one, StepDone) and isinstance(other, StepDone):
                assert (one.tokens, one.digest) == (other.tokens, other.digest)
                assert one.loss == pytest.approx(other.loss, rel=1e-3)  # bf16
                assert one.grad_norm == pytest.approx(other.grad_norm, rel=2e-2)
            if isinstance(one, Evaluated) and isinstance(other, Evaluated):
                assert one.rows == other.rows
                assert one.heldout_loss == pytest.approx(other.heldout_loss, rel=1e-3)


def test_a_block_that_is_compiled_no_more_is_told_once(
    tiny: Config, graphs: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_RECOMPILES", 1)
    config = uneven(tiny, **{"parallel.compile": True, "train.eval_tokens": 4 * 64})
    assert gave_up() == ""
    with dynamo.config.patch(recompile_limit=1):  # one graph, and evaluation before the first step has it
        found = events(config, "limited")
    [warned] = [event for event in found if isinstance(event, Warned)]
    assert "recompile limit" in warned.reason
    assert "parallel.compile" in warned.reason


def test_limits_of_dynamo_are_raised_and_never_lowered(graphs: Callable[[], int]) -> None:
    compiled.compile_block(torch.nn.Linear(1, 1))
    assert dynamo.config.recompile_limit == compiled._RECOMPILES > 8
    with dynamo.config.patch(recompile_limit=1000):
        compiled.compile_block(torch.nn.Linear(1, 1))
        assert dynamo.config.recompile_limit == 1000
