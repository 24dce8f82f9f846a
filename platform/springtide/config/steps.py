"""Two types for the number of a step: the count of steps done, and the index of a step in the order of batches.

They differ after a skipped step. In this example, step 2 of the order is skipped. When 2 steps are done, these are steps 0
and 1 of the order, and the next step of the order is 3:

    order step        0     1  skipped  3     4
    steps done     0     1         2       3     4

    >>> skipped = [OrderStep(2)]
    >>> step_before(StepsDone(2), skipped), step_after(StepsDone(2), skipped)
    (1, 3)
    >>> step_before(StepsDone(3), skipped), step_after(StepsDone(3), skipped)
    (3, 4)

The step of an event, a checkpoint or the training state is a count of steps done. The count equals the index of the last
trained step in the order, plus one, minus the number of skipped steps before it. A rollback lowers the count and adds skipped
steps; afterwards the same count belongs to a later step of the order. A branch is a run that starts from another run's state,
and continues the count of that run.
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
