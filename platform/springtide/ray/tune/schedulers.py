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
"""Schedulers under which trials take over each other's state."""


def known_as(scheduler: TrialScheduler) -> str:
    """Return the name under which ``scheduler_of`` makes a scheduler of this class, else the name of the class."""
    return _NAMES.get(type(scheduler), type(scheduler).__name__)


def scheduler_of(name: str, sweep: Sweep) -> TrialScheduler:
    """Return Tune's scheduler ``name``, with the rungs (evaluations of a trial) of the sweep's budget as its time. Raises
    ConfigError for an unknown name."""
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
    """An ASHA that stops no trial on a replayed result, which an earlier start of the sweep had, too. The earlier start has
    recorded which trials it stopped. Trials may now report in another order, which would lead to other decisions."""

    def on_trial_result(self, tune_controller: TuneController, trial: TuneTrial, result: TrialResult) -> str:
        """Handle a result. A replayed one stops no trial, but other results are compared with it."""
        decision: str = super().on_trial_result(tune_controller, trial, result)
        return TrialScheduler.CONTINUE if result.get("replayed") else decision


class _RepeatableMedian(MedianStoppingRule):
    """A median stopping rule that stops no trial on a replayed result, for the same reason as ``_RepeatableASHA``."""

    def on_trial_result(self, tune_controller: TuneController, trial: TuneTrial, result: TrialResult) -> str:
        """Handle a result. A replayed one stops no trial."""
        decision: str = super().on_trial_result(tune_controller, trial, result)
        if decision != TrialScheduler.STOP or not result.get("replayed"):
            return decision
        self._stopped_trials.discard(trial)  # else the trial's next result is an error
        return TrialScheduler.CONTINUE


class _SynchronousPBT(PopulationBasedTraining):
    """A synchronous PBT that does not wait for members (trials) that have ended."""

    _next_perturbation_sync: float

    def on_trial_result(self, tune_controller: TuneController, trial: TuneTrial, result: TrialResult) -> str:
        """Handle a result, then move to the next rung: a resumed population starts at a later rung than Tune assumes."""
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
        """Return the new config, with the checkpoint that the state comes from. Tune would restore the state from its own
        checkpoint, and may restore the trial's own checkpoint instead, if the checkpoint to restore was still being written."""
        config: TrialParameters
        config, changes = super()._get_new_config(trial, trial_to_clone)
        return {"trial": {**config["trial"], "of": self._trial_state[trial_to_clone].last_result["state"]}}, changes

    def _go_on(self, tune_controller: TuneController, over: TuneTrial | None = None) -> None:
        """Move to the next rung (evaluation) if all live members have reached the current rung."""
        live = [one for one in tune_controller.get_live_trials() if one is not over]
        reached = [self._trial_state[one].last_train_time for one in live]
        if reached and min(reached) >= self._next_perturbation_sync:
            self._next_perturbation_sync = max(reached) + self._perturbation_interval


class _SynchronousPB2(_SynchronousPBT, PB2):
    """A synchronous PB2 that does not wait for members (trials) that have ended."""


def _population(name: str, sweep: Sweep, asked: dict[str, object]) -> TrialScheduler:
    """Return a population's scheduler. Members (trials) wait for each other at each rung (evaluation), so that the result does
    not depend on which members lost workers. PBT changes the point that is taken over by a fifth, or draws a new one; PB2 takes
    the next point from a Gaussian process (Parker-Holder et al., 2020), along the ranges of the space, in logs where the space
    uses them."""
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
