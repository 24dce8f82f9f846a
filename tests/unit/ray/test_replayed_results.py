"""A resumed sweep reports the results of an earlier start again, in whatever order the trials' processes come up."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from springtide import config as configs
from springtide.ray.tune.schedulers import known_as, scheduler_of
from springtide.tune import read

TINY = configs.recipes.tiny()
TABLE = read(
    {
        "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1)},
        "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
        "BUDGET": {"trials": 4, "tokens_per_trial": 40 * TINY.tokens_per_step},
    },
    TINY,
)
LOSSES = {"a": (3.0, 2.0), "b": (2.9, 2.8), "c": (2.8, 2.5), "d": (2.7, 2.6)}


class OfTune:
    """A trial, as schedulers know it."""

    status = "RUNNING"

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id


class Play:
    """A scheduler, and trials that report to it."""

    def __init__(self, name: str) -> None:
        self.scheduler: Any = scheduler_of(name, TABLE)
        self.controller = SimpleNamespace(get_live_trials=list)
        self.trials = {trial: OfTune(trial) for trial in LOSSES}
        for trial in self.trials.values():
            self.scheduler.on_trial_add(self.controller, trial)
        self.told = dict.fromkeys(LOSSES, 0)

    def tell(self, trial: str, replayed: bool) -> str:
        self.told[trial] += 1
        iteration = self.told[trial]
        result = {"training_iteration": iteration, "heldout_loss": LOSSES[trial][iteration - 1], "replayed": replayed}
        return str(self.scheduler.on_trial_result(self.controller, self.trials[trial], result))


@pytest.mark.parametrize("name", ["asha", "median"])
def test_no_order_of_what_was_known_before_stops_a_trial_that_went_on(name: str) -> None:
    orders_that_stop = 0
    for order in itertools.permutations("abcd"):
        fresh = Play(name)
        orders_that_stop += "STOP" in [fresh.tell(trial, replayed=False) for trial in order]
        play = Play(name)
        assert {play.tell(trial, replayed=True) for trial in order} == {"CONTINUE"}
        assert {play.tell(trial, replayed=True) for trial in order if trial != "b"} == {"CONTINUE"}
        assert play.tell("b", replayed=False) == "STOP", "what was known before counts"
    assert orders_that_stop


def test_schedulers_have_their_names() -> None:
    assert [known_as(scheduler_of(name, TABLE)) for name in ("asha", "median")] == ["asha", "median"]
