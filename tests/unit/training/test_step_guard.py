"""Which steps may change the weights, and what a run that goes on remembers of it."""

from __future__ import annotations

import math

import pytest
from saving import meta
from stepping import done_step, result_of

from springtide import config as configs
from springtide.checkpoint.restore import Restored
from springtide.elastic import GroupRequest
from springtide.errors import TrainingFailed
from springtide.optim.loss_scale import LossScale
from springtide.training.part import DoneStep, Verdict
from springtide.training.step_guard import StepGuard


def judge(**changes: object) -> StepGuard:
    config = configs.recipes.tiny().override({f"optim.{key}": value for key, value in changes.items()})
    return StepGuard(config, LossScale(enabled=False))


def allows(one: StepGuard, loss: float, grad_norm: float) -> bool:
    return one.allows_update(result_of(loss=loss, grad_norm=grad_norm))


def rolls_back(one: StepGuard, *requests: GroupRequest) -> bool:
    return one.verdict(result_of(requests=frozenset(requests))) is Verdict.ROLL_BACK


def trained(one: StepGuard) -> StepGuard:
    for step in range(20):
        assert allows(one, 4.0 + 0.1 * (step % 3), 1.0)
    return one


def done(step: int, updated: bool) -> DoneStep:
    return done_step(step, result_of(updated=updated))


@pytest.mark.parametrize(("how", "accepted"), [("off", True), ("warn", True), ("skip", False), ("rollback", False)])
def test_a_spike_is_told_or_left_out_also_after_a_restart(how: str, accepted: bool) -> None:
    one, other = trained(judge(on_spike=how)), judge(on_spike=how)
    other.begin(Restored(type(meta(1)).model_validate_json(one.describe(meta(1)).model_dump_json()), "a"))
    for each in (one, other):
        assert allows(each, 40.0, 1.0) == accepted
        assert rolls_back(each) == rolls_back(each, GroupRequest.COPY) == (how == "rollback")
        assert not rolls_back(each, GroupRequest.SAVE), "who waits for a save gets it"
        told = list(each.after_step(done(21, accepted)))
        assert len(told) == (how != "off")
        assert not any(event.left_out for event in told if accepted)  # type: ignore[attr-defined]
    assert allows(judge(on_spike=how), 40.0, 1.0)  # with nothing to compare with


@pytest.mark.parametrize("how", ["off", "warn", "skip", "rollback"])
def test_a_gradient_that_is_not_finite_never_changes_a_weight(how: str) -> None:
    one = trained(judge(on_spike=how))
    assert not allows(one, 4.0, math.inf)
    assert not allows(one, math.nan, math.nan)
    assert rolls_back(one) == (how == "rollback")
    assert allows(one, 4.0, 1.0)


def test_a_run_ends_when_too_many_steps_are_skipped() -> None:
    """A run ends when too many are left out in a row and at once when it is the first."""
    one = judge(max_left_out=2)
    for updated in (False, False, True, False, False):
        allows(one, 4.0, 1.0 if updated else math.inf)
        list(one.after_step(done(5, updated)))
    allows(one, 4.0, math.inf)
    with pytest.raises(TrainingFailed, match=r"3 steps .*optim\.peak_lr"):
        list(one.after_step(done(6, False)))
    one = judge()
    allows(one, 4.0, math.inf)
    with pytest.raises(TrainingFailed, match=r"1 step\b"):
        list(one.after_step(done(1, False)))


def test_another_parts_veto_is_no_divergence() -> None:
    one = judge(max_left_out=2)
    for step in range(1, 9):
        assert allows(one, 4.0, 1.0)
        assert list(one.after_step(done(step, False))) == []
