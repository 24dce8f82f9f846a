"""The step guard: a step may change the weights only if its gradient norm is finite and the step is not a spike."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from springtide.checkpoint.format import Meta
from springtide.checkpoint.restore import Restored
from springtide.config import Config
from springtide.elastic import GroupRequest
from springtide.errors import TrainingFailed
from springtide.events import Event, Spiked
from springtide.optim.loss_scale import LossScale
from springtide.training.part import DoneStep, Part, StepResult, Verdict


class StepGuard(Part):
    """Decides for one run which steps may change the weights. All ranks call it with the same values, so they decide the
    same."""

    def __init__(self, config: Config, scale: LossScale) -> None:
        """``scale``: the fp16 loss scale, which is adapted after each step."""
        self._optim, self._scale = config.optim, scale
        self.begin(None)

    def begin(self, found: Restored | None) -> None:
        components = found.meta.components if found else {}
        self._scale.begin(components.get("loss_scale", {}))
        self._spikes = Spikes(_WINDOW, self._optim.spike_deviations)
        self._spikes.load(components.get("spikes", {}))
        self._spike: Spike | None = None
        """Spike in the current step; None if the step has no spike."""
        self._accepted = True
        self._left_out = 0
        """Number of skipped steps in a row up to now; 0 after a step that was not skipped."""

    def receive(self, result: StepResult) -> None:
        result.fields["loss_scale"] = self._scale.value

    def allows_update(self, result: StepResult) -> bool:
        """Return True if the gradient norm is finite, and the step is not a spike or ``optim.on_spike`` only warns."""
        loss, grad_norm = result.loss, result.grad_norm
        finite, how = math.isfinite(grad_norm), self._optim.on_spike
        # with a loss scale, a norm that is not finite is an fp16 overflow, not a fault of the rows: no reason to roll back
        looks = how != "off" and (finite or (how == "rollback" and not self._scale.enabled))
        self._spike = self._spikes.find(loss, grad_norm) if looks else None
        self._accepted = finite and (self._spike is None or how == "warn")
        if self._accepted:
            self._spikes.remember(loss, grad_norm)
        return self._accepted

    def verdict(self, result: StepResult) -> Verdict:
        """Return ROLL_BACK for a spike if ``optim.on_spike`` is rollback. If the group also received a request other than COPY
        in this step, such as to stop, only the update is skipped."""
        rolls_back = self._spike is not None and self._optim.on_spike == "rollback"
        return Verdict.ROLL_BACK if rolls_back and not result.requests - {GroupRequest.COPY} else Verdict.CONTINUE

    def after_step(self, done: DoneStep) -> Iterator[Event]:
        """Report a spike, and adapt the loss scale. Raises TrainingFailed if too many steps in a row were skipped, or if the
        first step of the run was skipped without an fp16 loss scale."""
        step, result = done.step, done.result
        if self._spike is not None:
            yield Spiked(step=step, left_out=not result.updated, **self._spike._asdict())
        else:
            self._scale.after(not self._accepted)
        # do not count updates that only another part (feature of the step) vetoed
        self._left_out = 0 if self._accepted else self._left_out + 1
        if self._left_out > self._optim.max_left_out or (self._left_out and step == 1 and not self._scale.enabled):
            steps = "steps in a row are" if self._left_out > 1 else "step is"
            raise TrainingFailed(
                f"{self._left_out} {steps} skipped, the last one, {step}, with loss {result.loss:g} and gradient norm "
                f"{result.grad_norm:g}; they changed no weights: lower optim.peak_lr, lengthen optim.warmup, or look at the "
                "rows of these steps"
            )

    def describe(self, meta: Meta) -> Meta:
        return meta.adding({"loss_scale": self._scale.state(), "spikes": self._spikes.state()})


# Detection of spikes: steps whose loss or gradient norm is far above those of the preceding steps. It works before the weights
# change. It uses medians, so that one spike does not hide the next.

_WINDOW = 128
"""Number of preceding steps that a step is compared with."""
_FEWEST = 16
"""Least number of preceding steps to compare with; with fewer steps, no step is called a spike."""
_RECENT = 9
"""Number of latest steps whose median is the usual value. It is less than ``_WINDOW``, because a loss falls over time."""
_DEVIATIONS = 1.4826 / math.sqrt(2)
"""The median absolute difference of successive steps, times this factor, estimates the standard deviation of normal noise. A
trend of the loss hardly changes these differences."""
_LEAST = 0.01
"""Lower bound of the deviation, as a share of the usual value [ratio]."""


class Spike(NamedTuple):
    """A loss or gradient norm far above its usual value."""

    what: str
    value: float
    usual: float
    """Median of the loss or gradient norm over the ``_RECENT`` steps before the spike."""
    deviations: float
    """Robust z-score: the number of deviations above the usual value."""


class Spikes:
    """Spike detector with the loss and gradient norm of the recent steps. All ranks pass the same values, so they find the same
    spikes."""

    def __init__(self, window: int, threshold: float) -> None:
        """``window``: number of steps to compare with. ``threshold``: number of deviations above the median from which a value
        is a spike."""
        self._threshold = threshold
        self._past: dict[str, deque[float]] = {"loss": deque(maxlen=window), "gradient norm": deque(maxlen=window)}

    def find(self, loss: float, grad_norm: float) -> Spike | None:
        """Return the spike of a step with this loss [nats] and gradient norm; None if the step is no spike."""
        for what, value in self._named(loss, grad_norm).items():
            past = self._past[what]
            if len(past) < _FEWEST:
                continue
            usual = statistics.median(list(past)[-_RECENT:])
            spread = _DEVIATIONS * statistics.median(abs(after - one) for one, after in itertools.pairwise(past))
            above = (value - usual) / max(spread, _LEAST * abs(usual), 1e-12)
            if not math.isfinite(value) or above > self._threshold:
                return Spike(what, value, usual, above)
        return None

    def remember(self, loss: float, grad_norm: float) -> None:
        """Add a step that has changed the weights, so that later steps are compared with it."""
        for what, value in self._named(loss, grad_norm).items():
            self._past[what].append(value)

    def state(self) -> dict[str, list[float]]:
        """Return the recent losses and gradient norms for a checkpoint, so that a resumed run finds the same spikes as an
        uninterrupted one."""
        return {what: list(past) for what, past in self._past.items()}

    @staticmethod
    def _named(loss: float, grad_norm: float) -> dict[str, float]:
        return {"loss": loss, "gradient norm": grad_norm}

    def load(self, state: Mapping[str, Any]) -> None:
        """Add the recent losses and gradient norms in ``state``, a result of the method ``state``."""
        for what, past in self._past.items():
            past.extend(state.get(what, []))
