"""A part of a run's own reads what all ranks agreed on; one that fails on a rank is named on all, and none of them hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from loops import train, train_each
from parts_of_ones_own import train_with
from ranks import each, run_here

from springtide.config import Config
from springtide.errors import ConfigError
from springtide.events import StepDone, Stopped

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]


@pytest.fixture
def short(tiny: Config) -> Config:
    step = tiny.tokens_per_step
    return tiny.override({"train.total": 5 * step, "train.eval_tokens": 0, "optim.warmup": 0, "train.sample_tokens": 0})


FAILURES = [
    ("raises", "ZeroDivisionError: at step 3", "PeerFailed: rank 1: Fails raised ZeroDivisionError: at step 3"),
    (
        "raises at once",
        "ZeroDivisionError: at step 1",
        "PeerFailed: rank 1: Fails raised ZeroDivisionError: at step 1",
    ),
    ("raises ours", "ConfigError: at step 3", "ConfigError: at step 3"),
    (
        "another length",
        "",
        "PartFailed: rank 1: other fields than in the group's first step: mine (sums, 2) in place of mine (sums, 1)",
    ),
    (
        "another name at once",
        "",
        "PartFailed: rank 1: other fields than rank 0: other (sums, 1) in place of mine (sums, 1); start the same code",
    ),
    (
        "twice",
        "ValueError: two parts add the field 'loss' to the step's message",
        "PeerFailed: rank 1: Fails raised Val",
    ),
]
"""How a part of rank 1 fails, what is raised there if not the same, and what on the others."""


def test_a_part_adds_a_figure_of_all_ranks_and_one_that_fails_on_one_is_named_on_all(
    short: Config, ranks: Ranks
) -> None:
    """One group trains all these runs: who left one before the others would be missed in the next."""
    hows = ["longest", *(how for how, _, _ in FAILURES)]
    found = ranks(3, each, [(train_with, (short.override({"run.id": how.replace(" ", "-")}), how)) for how in hows])
    alone = run_here(train_with, short, "longest")
    assert len(alone) == 5
    assert all(value > 0.0 for value in alone)
    longest, *failed = zip(*found, strict=True)
    assert list(longest) == [alone] * 3, "rows of a step do not depend on the number of ranks"
    for (how, here, said), (first, second, third) in zip(FAILURES, failed, strict=True):
        assert first.startswith(said), how
        assert first == third, how
        assert second == (here or first), how


@pytest.mark.full
def test_a_part_of_one_process_raises_its_own_error(short: Config) -> None:
    assert run_here(train_with, short, "raises on rank 0") == "ZeroDivisionError: at step 3"


def test_a_config_names_parts(short: Config, ranks: Ranks) -> None:
    """The example of the docs: it counts rows, and ends the run when the loss is low enough."""
    config = short.override({"train.parts": "examples.part:parts"})
    low = short.override({"run.id": "low", "train.parts": "parts_of_ones_own:ends_at_once"})
    events, ended = ranks(2, train_each, [config, low])[0]
    counts = [event.extra["short_rows"] for event in events if isinstance(event, StepDone)]
    assert counts == [0.0] * 5
    assert [(event.step, event.status) for event in ended if isinstance(event, Stopped)] == [(1, "stopped")]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", "raises ZeroDivisionError: of the user's own"),
        ("returns_none", "returned a NoneType"),
        ("returns_others", "returned a str"),
        ("takes_none", "takes ()"),
    ],
)
def test_a_function_that_returns_no_part_is_refused(short: Config, name: str, problem: str) -> None:
    config = short.override({"train.parts": f"parts_of_ones_own:{name}"})
    with pytest.raises(ConfigError, match=r"^train\.parts = .*" + re.escape(problem)):
        run_here(train, config)
