"""Which steps may change the weights, and what a run that goes on remembers of it."""

from __future__ import annotations

import json
import math

import pytest

from springtide import config as configs
from springtide.errors import TrainingFailed
from springtide.training.hooks import StepContext
from springtide.training.step import StepResult
from springtide.training.step_guard import StepGuard


def judge(**changes: object) -> StepGuard:
    return StepGuard(configs.recipes.tiny().override({f"optim.{key}": value for key, value in changes.items()}))


def trained(one: StepGuard) -> StepGuard:
    for step in range(20):
        assert one.allows_update(4.0 + 0.1 * (step % 3), 1.0)
    return one


def done(step: int, updated: bool) -> StepContext:
    result = StepResult(2.0, 1.0, 1, 0, frozenset(), False, False, False, False, False, (), (), updated)
    return StepContext(step, result, learning_rate=1e-3, step_time_s=0.1, data_wait_s=0.0)


@pytest.mark.parametrize(("how", "accepted"), [("off", True), ("warn", True), ("skip", False), ("rollback", False)])
def test_a_spike_is_told_or_left_out_also_after_a_restart(how: str, accepted: bool) -> None:
    one, other = trained(judge(on_spike=how)), judge(on_spike=how)
    other.load(json.loads(json.dumps(one.state())))
    for each in (one, other):
        assert each.allows_update(40.0, 1.0) == accepted
        assert each.needs_rollback == (how == "rollback")
        told = list(each.after_step(done(21, accepted)))
        assert len(told) == (how != "off")
        assert not any(event.left_out for event in told if accepted)  # type: ignore[attr-defined]
    assert judge(on_spike=how).allows_update(40.0, 1.0)  # with nothing to compare with


@pytest.mark.parametrize("how", ["off", "warn", "skip", "rollback"])
def test_a_gradient_that_is_not_finite_never_changes_a_weight(how: str) -> None:
    one = trained(judge(on_spike=how))
    assert not one.allows_update(4.0, math.inf)
    assert not one.allows_update(math.nan, math.nan)
    assert one.needs_rollback == (how == "rollback")
    assert one.allows_update(4.0, 1.0)


def test_a_run_ends_when_too_many_steps_are_skipped() -> None:
    """A run ends when too many are left out in a row and at once when it is the first."""
    one = judge(max_left_out=2)
    for updated in (False, False, True, False, False):
        list(one.after_step(done(5, updated)))
    with pytest.raises(TrainingFailed, match=r"3 steps .*optim\.peak_lr"):
        list(one.after_step(done(6, False)))
    with pytest.raises(TrainingFailed, match=r"1 step\b"):
        list(judge().after_step(done(1, False)))
