"""Decision whether a step may change the weights: its gradient norm is finite, and the step is not a spike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from springtide.config import Config
from springtide.errors import TrainingFailed
from springtide.events import Event, Spiked
from springtide.training.hooks import StepContext, StepHook
from springtide.training.loss_scale import LossScale
from springtide.training.spikes import Spike, Spikes


class StepGuard(StepHook):
    """Step guard of one run. All ranks ask with the same values, so they get the same answers."""

    def __init__(self, config: Config) -> None:
        self.scale = LossScale(config.parallel.precision == "fp16")
        self._optim = config.optim
        self._spikes = Spikes(config.optim.spike_window, config.optim.spike_deviations)
        self._spike: Spike | None = None
        """Spike of the current step."""
        self._left_out = 0
        """Skipped steps in a row."""

    def allows_update(self, loss: float, grad_norm: float) -> bool:
        """Return True if a step with this loss [nats] and gradient norm may change the weights. Call it before the update."""
        finite, how = math.isfinite(grad_norm), self._optim.on_spike
        # an fp16 overflow says nothing about the rows
        looks = how != "off" and (finite or (how == "rollback" and not self.scale.enabled))
        self._spike = self._spikes.find(loss, grad_norm) if looks else None
        accepted = finite and (self._spike is None or how == "warn")
        if accepted:
            self._spikes.remember(loss, grad_norm)
        return accepted

    @property
    def needs_rollback(self) -> bool:
        """Whether the current step must be rolled back, and the steps before it, back to a checkpoint."""
        return self._spike is not None and self._optim.on_spike == "rollback"

    def after_step(self, done: StepContext) -> Iterator[Event]:
        """Yield the events of a step. Raises TrainingFailed if too many steps were skipped, or the first step of a run."""
        step, result = done.step, done.result
        if self._spike is not None:
            yield Spiked(step=step, left_out=not result.updated, **self._spike._asdict())
        else:
            self.scale.after(not result.updated)
        self._left_out = 0 if result.updated else self._left_out + 1
        if self._left_out > self._optim.max_left_out or (self._left_out and step == 1 and not self.scale.enabled):
            steps = "steps in a row are" if self._left_out > 1 else "step is"
            raise TrainingFailed(
                f"{self._left_out} {steps} skipped, the last one, {step}, with loss {result.loss:g} and gradient norm "
                f"{result.grad_norm:g}; they changed no weights: lower optim.peak_lr, lengthen optim.warmup, or look at the "
                "rows of these steps"
            )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"loss_scale": self.scale.state(), "spikes": self._spikes.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``, or from a part of it."""
        self.scale.load(state.get("loss_scale", {}))
        self._spikes.load(state.get("spikes", {}))
