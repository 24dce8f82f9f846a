"""What a trial's process returns to Ray Tune, whose strict check ends the whole sweep over a result without the objective."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.execution.tune_controller import TuneController
from ray.tune.search import ConcurrencyLimiter, SearchGenerator

from springtide import config as configs
from springtide.on_ray.tune.messages import TrialResult
from springtide.on_ray.tune.schedulers import SCHEDULERS, scheduler_of
from springtide.on_ray.tune.trial import Trial
from springtide.on_ray.tune.trial_runner import Finished, Message
from springtide.on_ray.tune.tuner import SearchAdapter
from springtide.tuning import read, search_of

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
