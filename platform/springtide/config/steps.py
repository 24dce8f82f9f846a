"""The two numbers of a step, as types: the count of steps done, and the index of a step in the order of batches.

A count lies between the step of the order that was trained last and the one that is trained next. Here step 2 is skipped. When
2 steps are done, these are steps 0 and 1, and step 3 is next:

    order step        0     1  skipped  3     4
    steps done     0     1         2       3     4

    >>> skipped = [OrderStep(2)]
    >>> step_before(StepsDone(2), skipped), step_after(StepsDone(2), skipped)
    (1, 3)
    >>> step_before(StepsDone(3), skipped), step_after(StepsDone(3), skipped)
    (3, 4)

The step of an event, a checkpoint or the training state is a count. It equals the index of the last trained step in the order,
plus one, minus the number of steps skipped before. A rollback lowers the count and adds skipped steps, so the same count then
lies further on in the order. A branch, which is a run that starts from another run's state, continues the count of that run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

StepsDone = NewType("StepsDone", int)
"""Number of steps done: the step of an event, a checkpoint or the training state."""

OrderStep = NewType("OrderStep", int)
"""Index of a step in the order of batches, from 0; skipped steps have an index too."""


def step_after(done: StepsDone, skipped: Iterable[OrderStep] = ()) -> OrderStep:
    """Return the step of the order that is trained next when ``done`` steps are done and the ``skipped`` steps are left out."""
    step = int(done)
    if not skipped:  # shortcut for most runs: this function is called twice per step
        return OrderStep(step)
    for one in sorted(set(skipped)):
        if one > step:
            break
        step += 1
    return OrderStep(step)


def step_before(done: StepsDone, skipped: Iterable[OrderStep] = ()) -> OrderStep:
    """Return the step of the order that was trained last when ``done`` steps (at least one) are done and the ``skipped`` steps
    are left out."""
    return step_after(StepsDone(done - 1), skipped)


def one_more(done: StepsDone) -> StepsDone:
    """Return ``done`` plus one, as a count of steps."""
    return StepsDone(done + 1)
