"""What happens around a step: hooks that the loop asks and calls in turn, one after the other, on every rank.

signals        what this rank tells the others in the step's all-reduce
compute_first  how the first micro-batch of the step is computed
before_update  the last moment before the weights may change
after_step     after every step
between_steps  after a step that training continues from; then its weights may be copied
close          the end of this stretch of training, also after an error
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from springtide.config.steps import StepsDone
from springtide.events import Event
from springtide.training.step import Compute, StepResult, StepSignals


@dataclasses.dataclass(frozen=True)
class StepContext:
    """A step that is done, the same on every rank but for the times."""

    step: StepsDone
    """Steps done, this one included."""
    result: StepResult
    learning_rate: float
    step_time_s: float
    """From the end of the step before to the end of this one [s]."""
    data_wait_s: float
    """How long this rank waited for its batch [s]."""


class StepHook:
    """Takes part in steps. Every method does nothing here; a hook has those that it needs."""

    def signals(self, signals: StepSignals, step: StepsDone) -> StepSignals:
        """Return ``signals`` with what this rank adds, in the step after which ``step`` steps are done."""
        return signals

    def compute_first(self, compute: Compute) -> Compute:
        """Return ``compute`` with what this hook does around the first micro-batch of the step."""
        return compute

    def before_update(self) -> None:
        """Wait until the weights may change."""

    def after_step(self, done: StepContext) -> Iterator[Event]:
        """Yield the events of a step."""
        return iter(())

    def between_steps(self, done: StepContext) -> Iterator[Event]:
        """Act on a step that is not the last, and yield events."""
        return iter(())

    def close(self) -> None:
        """Release what is held."""


class StepHooks(StepHook):
    """Several hooks as one, in their order; closed in the opposite one."""

    def __init__(self, hooks: Sequence[StepHook]) -> None:
        self._hooks = tuple(hooks)

    def signals(self, signals: StepSignals, step: StepsDone) -> StepSignals:
        for hook in self._hooks:
            signals = hook.signals(signals, step)
        return signals

    def compute_first(self, compute: Compute) -> Compute:
        for hook in self._hooks:
            compute = hook.compute_first(compute)
        return compute

    def before_update(self) -> None:
        for hook in self._hooks:
            hook.before_update()

    def after_step(self, done: StepContext) -> Iterator[Event]:
        for hook in self._hooks:
            yield from hook.after_step(done)

    def between_steps(self, done: StepContext) -> Iterator[Event]:
        for hook in self._hooks:
            yield from hook.between_steps(done)

    def close(self) -> None:
        for hook in reversed(self._hooks):
            hook.close()
