"""Whether a step may change the weights: its gradient is finite, and nothing about it is far from the steps before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from springtide.config import Config
from springtide.errors import TrainingFailed
from springtide.events import Event, Spiked
from springtide.training.loss_scale import LossScale
from springtide.training.spikes import Spike, Spikes
from springtide.training.step import StepResult


class StepGuard:
    """Of one run. All ranks ask with the same figures, and so hear the same."""

    def __init__(self, config: Config) -> None:
        self.scale = LossScale(config.parallel.precision == "fp16")
        self._optim = config.optim
        self._spikes = Spikes(config.optim.spike_window, config.optim.spike_deviations)
        self._spike: Spike | None = None
        """Of the step under way."""
        self._left_out = 0
        """Steps one after the other."""

    def allows_update(self, loss: float, grad_norm: float) -> bool:
        """Before the update of a step of this loss [nats] and norm."""
        finite, how = math.isfinite(grad_norm), self._optim.on_spike
        # an overflow of fp16 says nothing of the rows
        looks = how != "off" and (finite or (how == "rollback" and not self.scale.enabled))
        self._spike = self._spikes.find(loss, grad_norm) if looks else None
        accepted = finite and (self._spike is None or how == "warn")
        if accepted:
            self._spikes.remember(loss, grad_norm)
        return accepted

    @property
    def needs_rollback(self) -> bool:
        """Whether the step just judged is to be undone, and those before it back to a checkpoint."""
        return self._spike is not None and self._optim.on_spike == "rollback"

    def after(self, step: int, result: StepResult) -> Iterator[Event]:
        """What there is to tell of it. TrainingFailed when too many have been left out, or the very first one of a run."""
        if self._spike is not None:
            yield Spiked(step=step, left_out=not result.updated, **self._spike._asdict())
        else:
            self.scale.after(not result.updated)
        self._left_out = 0 if result.updated else self._left_out + 1
        if self._left_out > self._optim.max_left_out or (self._left_out and step == 1 and not self.scale.enabled):
            steps = "steps in a row are" if self._left_out > 1 else "step is"
            raise TrainingFailed(
                f"{self._left_out} {steps} left out, the last one, {step}, with loss {result.loss:g} and gradient norm "
                f"{result.grad_norm:g}; the weights are those of before: lower optim.peak_lr, lengthen optim.warmup, or look "
                "at the rows of these steps"
            )

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"loss_scale": self.scale.state(), "spikes": self._spikes.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state``, or a part of it."""
        self.scale.load(state.get("loss_scale", {}))
        self._spikes.load(state.get("spikes", {}))
