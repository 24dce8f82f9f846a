"""Ray Tune's schedulers for a sweep. Their unit of time is a rung: the training between two evaluations."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.schedulers.pb2 import PB2

from springtide import config as configs
from springtide.errors import ConfigError, explain, look_up
from springtide.ray.tune.messages import TrialParameters, TrialResult
from springtide.tune import Sweep, check_population, clamped, draw, point_at

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial as TuneTrial

SCHEDULERS = ("none", "asha", "hyperband", "median", "pbt", "pb2")
POPULATIONS = ("pbt", "pb2")
"""Schedulers under which trials take over each other's state (population-based training)."""


def known_as(scheduler: TrialScheduler) -> str:
    """Return the name under which ``scheduler_of`` makes schedulers of this class, such as 'asha'. For any other class, return
    the class's name."""
    return _NAMES.get(type(scheduler), type(scheduler).__name__)


def scheduler_of(name: str, sweep: Sweep) -> TrialScheduler:
    """Return Tune's scheduler of this name. Its unit of time is a rung (the training between two evaluations of a trial). The
    sweep's budget sets the number of rungs. Raises ConfigError for an unknown name."""
    if name not in SCHEDULERS:
        raise ConfigError(explain("--scheduler", name, "is not known", configs.nearest(name, SCHEDULERS)))
    asked = {"metric": sweep.metric, "mode": sweep.mode}
    rungs, reduction = sweep.budget.rungs, sweep.budget.reduction
    if name == "asha":
        return _RepeatableASHA(max_t=rungs, grace_period=1, reduction_factor=reduction, stop_last_trials=False, **asked)
    if name == "hyperband":
        return HyperBandScheduler(max_t=rungs, reduction_factor=reduction, stop_last_trials=False, **asked)
    if name == "median":
        return _RepeatableMedian(time_attr="training_iteration", grace_period=1, **asked)
    if name in POPULATIONS:
        check_population(sweep, name)
        return _population(name, sweep, {**asked, "time_attr": "rung", "perturbation_interval": 1, "synch": True})
    return look_up({"none": FIFOScheduler}, "--scheduler", name)()


class _RepeatableASHA(ASHAScheduler):
    """An ASHA that stops no trial on a replayed result, which an earlier start of the sweep had already. The earlier start has
    recorded which trials it stopped. After a resume, trials may report in another order, and ASHA would then stop other
    trials."""

    def on_trial_result(self, tune_controller: TuneController, trial: TuneTrial, result: TrialResult) -> str:
        """Handle a result. A replayed result stops no trial, but new results are compared with it."""
        decision: str = super().on_trial_result(tune_controller, trial, result)
        return TrialScheduler.CONTINUE if result.get("replayed") else decision


class _RepeatableMedian(MedianStoppingRule):
    """A median stopping rule that stops no trial on a replayed result, which an earlier start of the sweep had already."""

    def on_trial_result(self, tune_controller: TuneController, trial: TuneTrial, result: TrialResult) -> str:
        """Handle a result. A replayed result stops no trial."""
        decision: str = super().on_trial_result(tune_controller, trial, result)
        if decision != TrialScheduler.STOP or not result.get("replayed"):
            return decision
        self._stopped_trials.discard(trial)  # the trial continues: Tune fails at a result of a stopped trial
        return TrialScheduler.CONTINUE


class _SynchronousPBT(PopulationBasedTraining):
    """Synchronous PBT (population-based training) that does not wait for members (trials) that have ended."""

    _next_perturbation_sync: float

    def on_trial_result(self, tune_controller: TuneController, trial: TuneTrial, result: TrialResult) -> str:
        """Handle a result, then move to the next rung if all trials have reached the current one. Tune alone would assume too
        early a rung for a resumed population."""
        decision: str = super().on_trial_result(tune_controller, trial, result)
        self._go_on(tune_controller)
        return decision

    def on_trial_complete(self, tune_controller: TuneController, trial: TuneTrial, result: TrialResult) -> None:
        super().on_trial_complete(tune_controller, trial, result)
        self._go_on(tune_controller, trial)

    def on_trial_error(self, tune_controller: TuneController, trial: TuneTrial) -> None:
        super().on_trial_error(tune_controller, trial)
        self._go_on(tune_controller, trial)

    def _get_new_config(self, trial: TuneTrial, trial_to_clone: TuneTrial) -> tuple[TrialParameters, dict[str, object]]:
        """Return the config of a trial that takes over another trial's state, with the URL of the state's checkpoint. Tune
        itself is not used to restore the state: while the other trial's checkpoint is still being written, Tune may restore the
        trial's own old checkpoint instead."""
        config: TrialParameters
        config, changes = super()._get_new_config(trial, trial_to_clone)
        return {"trial": {**config["trial"], "of": self._trial_state[trial_to_clone].last_result["state"]}}, changes

    def _go_on(self, tune_controller: TuneController, over: TuneTrial | None = None) -> None:
        """Move the population to the next rung (evaluation) if all live members (trials) have reached the current rung."""
        live = [one for one in tune_controller.get_live_trials() if one is not over]
        reached = [self._trial_state[one].last_train_time for one in live]
        if reached and min(reached) >= self._next_perturbation_sync:
            self._next_perturbation_sync = max(reached) + self._perturbation_interval


class _SynchronousPB2(_SynchronousPBT, PB2):
    """A synchronous PB2 that does not wait for members (trials) that have ended."""


def _population(name: str, sweep: Sweep, asked: dict[str, object]) -> TrialScheduler:
    """Return a population's scheduler. Members (trials) wait for each other at each rung (evaluation), so that the result does
    not depend on which members lost workers. A member that takes over another member's state gets a changed copy of that
    member's point (settings). PBT changes each value by a fifth, or draws a new value. PB2 takes the next point from a Gaussian
    process (Parker-Holder et al., 2020). Its inputs are positions from 0 to 1 within the settings' ranges, on a logarithmic
    scale for logarithmic ranges."""
    if name == "pb2":

        def explore(config: TrialParameters) -> TrialParameters:
            trial = config["trial"]
            return {"trial": {**trial, "point": point_at(sweep, trial["shares"])}}

        bounds = {"trial": {"shares": {one.field: [0.0, 1.0] for one in sweep.space}}}
        return _SynchronousPB2(hyperparam_bounds=bounds, custom_explore_fn=explore, log_config=False, **asked)

    def explore_near(config: TrialParameters) -> TrialParameters:
        trial = config["trial"]
        return {"trial": {**trial, "point": clamped(sweep, trial["point"])}}

    near = {
        one.field: list(one.values) if one.kind == "choice" else functools.partial(draw, one, random.Random())
        for one in sweep.space
    }
    return _SynchronousPBT(
        hyperparam_mutations={"trial": {"point": near}}, custom_explore_fn=explore_near, log_config=False, **asked
    )


_NAMES = {
    FIFOScheduler: "none",
    _RepeatableASHA: "asha",
    HyperBandScheduler: "hyperband",
    _RepeatableMedian: "median",
    _SynchronousPBT: "pbt",
    _SynchronousPB2: "pb2",
}
