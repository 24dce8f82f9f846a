"""Decision whether a step may change the weights: its gradient norm is finite, and the step is not a spike."""

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
    """Step guard of one run. All ranks ask with the same values, so they get the same answers."""

    def __init__(self, config: Config, scale: LossScale) -> None:
        """``scale`` is adapted after each step."""
        self._optim, self._scale = config.optim, scale
        self.begin(None)

    def begin(self, found: Restored | None) -> None:
        components = found.meta.components if found else {}
        self._scale.begin(components.get("loss_scale", {}))
        self._spikes = Spikes(_WINDOW, self._optim.spike_deviations)
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


# Detection of steps whose loss or gradient norm is far above those before: before the weights change, and by robust
# statistics, so that one spike does not hide the next.

_WINDOW = 128
"""Preceding steps that a step is compared with."""
_FEWEST = 16
"""Least number of steps to compare with; with fewer, nothing is a spike."""
_RECENT = 9
"""Number of latest steps whose median a step is expected to have: a loss falls."""
_DEVIATIONS = 1.4826 / math.sqrt(2)
"""Median difference of successive steps -> standard deviation of normal noise; a trend hardly changes it."""
_LEAST = 0.01
"""Least deviation, as a share of the usual value [ratio]."""


class Spike(NamedTuple):
    """A value far above the usual one."""

    what: str
    value: float
    usual: float
    """The median of the steps just before."""
    deviations: float
    """Robust z-score: the number of deviations above the usual value."""


class Spikes:
    """The recent steps of a run. All ranks give it the same values, so they find the same spikes."""

    def __init__(self, window: int, threshold: float) -> None:
        """``window``: steps to compare with; ``threshold``: deviations above the median that make a spike."""
        self._threshold = threshold
        self._past: dict[str, deque[float]] = {"loss": deque(maxlen=window), "gradient norm": deque(maxlen=window)}

    def find(self, loss: float, grad_norm: float) -> Spike | None:
        """Return the spike of a step with this loss [nats] and gradient norm, None if it is not one."""
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
        """Add a step that has changed the weights: later steps are compared with it."""
        for what, value in self._named(loss, grad_norm).items():
            self._past[what].append(value)

    def state(self) -> dict[str, list[float]]:
        """Return the state for a checkpoint: a resumed run compares with the same steps as an uninterrupted one."""
        return {what: list(past) for what, past in self._past.items()}

    @staticmethod
    def _named(loss: float, grad_norm: float) -> dict[str, float]:
        return {"loss": loss, "gradient norm": grad_norm}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``."""
        for what, past in self._past.items():
            past.extend(state.get(what, []))
