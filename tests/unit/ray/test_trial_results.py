"""What a trial's process returns to Ray Tune, whose strict check ends the whole sweep over a result without the objective."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.execution.tune_controller import TuneController
from ray.tune.search import ConcurrencyLimiter, SearchGenerator

from springtide import config as configs
from springtide.errors import SpringtideError, StoreLost, StoreUnavailable, TrainingFailed, TrainingInterrupted
from springtide.ray.tune.messages import TrialResult
from springtide.ray.tune.schedulers import SCHEDULERS, scheduler_of
from springtide.ray.tune.trial import Trial
from springtide.ray.tune.trial_runner import Failed, Finished, Message
from springtide.ray.tune.tuner import SearchAdapter
from springtide.tune import read, search_of

TINY = configs.recipes.tiny()
TABLE = read(
    {
        "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1)},
        "OBJECTIVE": {"metric": "heldout_loss", "mode": "min", "secondary": {"metric": "step_worker_s", "mode": "min"}},
        "BUDGET": {"trials": 4, "tokens_per_trial": 40 * TINY.tokens_per_step},
    },
    TINY,
)


def trial_that_hears(message: Message) -> Any:
    """Return a trial whose run's next message is ``message``, and that has reported nothing yet."""
    trial = object.__new__(Trial)
    trial._job = SimpleNamespace(sweep=TABLE)  # type: ignore[assignment]
    trial._number, trial._reported, trial._last = 3, 0, TrialResult(number=3)
    trial._runner = SimpleNamespace(next=lambda: message, config=TINY)  # type: ignore[assignment]
    return trial


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_trial_that_ends_before_its_first_evaluation_has_a_result_that_tune_accepts(name: str) -> None:
    found = trial_that_hears(Finished()).step()
    assert found == {"number": 3, "heldout_loss": math.inf, "done": True, "over": True}
    points = SearchAdapter(search_of("random", TABLE, TINY, 0, []), TABLE, lambda number, point: True, lambda: 4)
    search = SearchGenerator(ConcurrencyLimiter(points, max_concurrent=4))
    controller: Any = SimpleNamespace(_metric=None, _scheduler_alg=scheduler_of(name, TABLE), _search_alg=search)
    of_tune = {"training_iteration": 1, "time_this_iter_s": 0.1, "trial_id": "x", "pid": 1}
    TuneController._validate_result_metrics(controller, {**found, **of_tune})


@pytest.mark.parametrize(
    "error",
    [
        StoreLost("the store cannot be reached"),
        StoreUnavailable("503 Slow Down"),
        TrainingInterrupted("the mailbox has ended; resume with --resume"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_trial_that_was_interrupted_has_no_result_and_so_no_end(error: SpringtideError) -> None:
    with pytest.raises(type(error)):
        trial_that_hears(Failed(error)).step()


def test_a_trial_whose_training_failed_says_why() -> None:
    found = trial_that_hears(Failed(TrainingFailed("rank 0: its loss was not finite"))).step()
    assert found == {"number": 3, "heldout_loss": math.inf, "done": True, "failed": "rank 0: its loss was not finite"}
