"""The two numbers of a step, as types: how many steps are done, and the place of a step in the order of batches.

A count stands between two steps of the order, the one that was trained last and the one that is trained next. Here step 2 is
skipped, so no count stands after it:

    order step        0     1     2     3     4
    steps done     0     1     2           3     4

    >>> skipped = [OrderStep(2)]
    >>> step_before(StepsDone(2), skipped), step_after(StepsDone(2), skipped)
    (1, 3)
    >>> step_before(StepsDone(3), skipped), step_after(StepsDone(3), skipped)
    (3, 4)

So the step of an event, a checkpoint or the training state, all of them counts, is one more than the step of the order that
was trained last, less the steps skipped until then. A rollback lowers the count and adds skipped steps: the same counts then
stand further on in the order. A branch continues the count of its trunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

StepsDone = NewType("StepsDone", int)
"""A number of steps that are done: the step of an event, a checkpoint, the training state."""

OrderStep = NewType("OrderStep", int)
"""An index into the order of batches, from 0; skipped steps count."""


def step_after(done: StepsDone, skipped: Iterable[OrderStep] = ()) -> OrderStep:
    """Return the step that is trained next when ``done`` steps are done, in an order without the ``skipped`` steps."""
    step = int(done)
    if not skipped:  # as a rule, and asked twice a step
        return OrderStep(step)
    for one in sorted(set(skipped)):
        if one > step:
            break
        step += 1
    return OrderStep(step)


def step_before(done: StepsDone, skipped: Iterable[OrderStep] = ()) -> OrderStep:
    """Return the step that was trained last when ``done`` steps are done, at least one, without the ``skipped`` steps."""
    return step_after(StepsDone(done - 1), skipped)


def one_more(done: StepsDone) -> StepsDone:
    """Return the number of steps done after the next one."""
    return StepsDone(done + 1)
