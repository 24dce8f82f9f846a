"""Decision whether a step may change the weights: its gradient norm is finite, and the step is not a spike."""

from __future__ import annotations

import math
from collections.abc import Iterator

from springtide.checkpoint.format import Meta
from springtide.checkpoint.restore import Restored
from springtide.config import Config
from springtide.elastic import GroupRequest
from springtide.errors import TrainingFailed
from springtide.events import Event, Spiked
from springtide.optim.loss_scale import LossScale
from springtide.training.part import DoneStep, Part, StepResult, Verdict
from springtide.training.spikes import Spike, Spikes


class StepGuard(Part):
    """Step guard of one run. All ranks ask with the same values, so they get the same answers."""

    def __init__(self, config: Config, scale: LossScale) -> None:
        """``scale`` is adapted after each step."""
        self._optim, self._scale = config.optim, scale
        self.begin(None)

    def begin(self, found: Restored | None) -> None:
        components = found.meta.components if found else {}
        self._scale.begin(components.get("loss_scale", {}))
        self._spikes = Spikes(self._optim.spike_window, self._optim.spike_deviations)
        self._spikes.load(components.get("spikes", {}))
        self._spike: Spike | None = None
        """Spike of the current step."""
        self._accepted = True
        self._left_out = 0
        """Skipped steps in a row."""

    def receive(self, result: StepResult) -> None:
        result.fields["loss_scale"] = self._scale.value

    def allows_update(self, result: StepResult) -> bool:
        """Return True if the gradient norm is finite and the step is no spike, or spikes only warn."""
        loss, grad_norm = result.loss, result.grad_norm
        finite, how = math.isfinite(grad_norm), self._optim.on_spike
        # an fp16 overflow says nothing about the rows
        looks = how != "off" and (finite or (how == "rollback" and not self._scale.enabled))
        self._spike = self._spikes.find(loss, grad_norm) if looks else None
        self._accepted = finite and (self._spike is None or how == "warn")
        if self._accepted:
            self._spikes.remember(loss, grad_norm)
        return self._accepted

    def verdict(self, result: StepResult) -> Verdict:
        """Return ROLL_BACK for a spike, unless a save was requested: then the step is only skipped."""
        rolls_back = self._spike is not None and self._optim.on_spike == "rollback"
        return Verdict.ROLL_BACK if rolls_back and not result.requests - {GroupRequest.COPY} else Verdict.CONTINUE

    def after_step(self, done: DoneStep) -> Iterator[Event]:
        """Yield the events of a step. Raises TrainingFailed if too many steps were skipped, or the first step of a run."""
        step, result = done.step, done.result
        if self._spike is not None:
            yield Spiked(step=step, left_out=not result.updated, **self._spike._asdict())
        else:
            self._scale.after(not self._accepted)
        self._left_out = 0 if self._accepted else self._left_out + 1  # another part's veto is no divergence
        if self._left_out > self._optim.max_left_out or (self._left_out and step == 1 and not self._scale.enabled):
            steps = "steps in a row are" if self._left_out > 1 else "step is"
            raise TrainingFailed(
                f"{self._left_out} {steps} skipped, the last one, {step}, with loss {result.loss:g} and gradient norm "
                f"{result.grad_norm:g}; they changed no weights: lower optim.peak_lr, lengthen optim.warmup, or look at the "
                "rows of these steps"
            )

    def describe(self, meta: Meta) -> Meta:
        return meta.adding({"loss_scale": self._scale.state(), "spikes": self._spikes.state()})
