"""A part of training: what a feature does in the steps of a worker group. The step and the loop know parts only by ``Part``.

Each method is called on every rank, on one part after the other, in the order of ``parts.py``:

    begin            a stretch of training begins: the state is restored
    at_start         the worker group has begun; before its first step
    before_step      the step's batch is there
    wrap_compute     how the micro-batches of this step are computed
    contribute       after backward: add fields to the step's message
    receive          read what all ranks agreed on; may change the gradient norm and add figures
    add_gradients    the gradients are clipped
    before_update    the weights may change when this returns
    allows_update    return False to leave the weights as they are
    verdict          what training does after this step
    after_step       after every step
    between_steps    after a step that training continues from: its weights may be copied
    at_end           the stretch ends
    describe         add what a checkpoint records of this part
    close            release what is held, also after an error; in the opposite order
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from springtide.checkpoint.format import Meta
from springtide.checkpoint.restore import Restored
from springtide.config.steps import StepsDone
from springtide.elastic import GroupRequest
from springtide.events import Event
from springtide.training.losses import NO_COLUMNS, Compute
from springtide.training.message import Agreed, StepMessage

_NONE_DONE = StepsDone(0)
_NO_SAMPLES = np.zeros(0, dtype=np.uint64)


class Verdict(enum.IntEnum):
    """What training does after a step. The largest one of all parts counts."""

    CONTINUE = 0
    ROLL_BACK = 1
    """Go back to a checkpoint before this step."""
    LEAVE = 2
    """Hand the state over to the next worker group."""
    STOP = 3
    """Save, and end before the last step."""
    FINISH = 4
    """Save and end: this was the last step."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One rank's share of a step: what it computes."""

    rows: Tensor
    """This rank's rows, int64 (n, L + 1), negative where they are not predicted (``shards.signed``), on its device."""
    micro_batches: Sequence[slice]
    """Of the rows; as many as on every other rank."""
    tokens_per_step: int
    """Tokens of a step whose rows are all full, over all ranks."""
    padded_rows: int = 0
    """Each micro-batch is filled up to these."""
    sample_ids: np.ndarray = dataclasses.field(default_factory=lambda: _NO_SAMPLES)
    """Of the rows, uint64 (n,)."""
    columns: Mapping[str, Tensor] = dataclasses.field(default_factory=lambda: NO_COLUMNS)
    """Labels of the rows, (n, ...) each, for the objective."""
    seeds: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """As from ``lane_seeds``."""
    step: StepsDone = _NONE_DONE
    """Steps done before."""
    name: str = "a step"
    """For errors."""
    data_wait_s: float = 0.0
    """How long this rank waited for its batch [s]."""


@dataclasses.dataclass(frozen=True)
class Share:
    """One rank's share of a step after backward: what it computed."""

    work: Work
    sums: Tensor
    """The loss of this rank's rows in nats, float64 (1,); with an objective all of its sums, (size,)."""
    row_nats: Tensor | None
    """Cross-entropy of each row, float64 (n,); None with an objective."""
    row_tokens: Tensor
    """Predicted tokens of each row, float64 (n,)."""
    gradients: list[Tensor]
    """This rank's shards."""
    loss_weight: float
    """The gradients are those of the loss times this."""


@dataclasses.dataclass
class StepResult:
    """Result of a step, the same on every rank."""

    loss: float
    """Nats per token. With an objective: its sum divided by its total weight."""
    grad_norm: float
    tokens: int
    digest: int
    """64 bits over the sample ids of all ranks."""
    agreed: Agreed = dataclasses.field(default_factory=Agreed)
    """All fields of the step's message."""
    correction: float = 1.0
    """The gradients of ``Share`` times this are those of the loss per token."""
    requests: frozenset[GroupRequest] = frozenset()
    """Made to any rank until this step."""
    updated: bool = True
    """The weights have changed."""
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    """Figures that only some runs report (``events.metrics.EXTRA_METRICS``)."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the event ``StepDone``."""


@dataclasses.dataclass(frozen=True)
class DoneStep:
    """A step that is done, the same on every rank except for the times."""

    step: StepsDone
    """Steps done, this one included."""
    result: StepResult
    learning_rate: float
    step_time_s: float
    """From the end of the step before to the end of this one [s]."""
    data_wait_s: float
    """How long this rank waited for its batch [s]."""
    verdict: Verdict = Verdict.CONTINUE


class Part:
    """Takes part in steps. All methods are no-ops; override the ones you need."""

    started: Mapping[str, Any] = {}
    """Fields of the event ``Started``."""

    def begin(self, found: Restored | None) -> None:
        """Begin a stretch of training. ``found``: the state that it goes on from; None for new weights."""

    def at_start(self) -> Iterator[Event]:
        """Yield events before the first step of a worker group. Not called again after a rollback."""
        return iter(())

    def before_step(self, work: Work) -> None:
        """Prepare a step."""

    def wrap_compute(self, compute: Compute) -> Compute:
        """Return ``compute`` with what this part does around each micro-batch of this step."""
        return compute

    def contribute(self, message: StepMessage, share: Share) -> None:
        """Add fields to the message: the same names, kinds and lengths in each step and on each rank. Does not wait."""

    def receive(self, result: StepResult) -> None:
        """Read what all ranks agreed on, before the weights change."""

    def add_gradients(self, clip: float) -> None:
        """Add to the gradients, which were multiplied by ``clip`` (at most 1)."""

    def before_update(self) -> None:
        """Wait until the weights may change."""

    def allows_update(self, result: StepResult) -> bool:
        """Return True if this step may change the weights; the same on every rank."""
        return True

    def verdict(self, result: StepResult) -> Verdict:
        """Return what training does after this step; the same on every rank."""
        return Verdict.CONTINUE

    def after_step(self, done: DoneStep) -> Iterator[Event]:
        """Yield the events of a step."""
        return iter(())

    def between_steps(self, done: DoneStep) -> Iterator[Event]:
        """Act on a step whose verdict is CONTINUE, and yield events."""
        return iter(())

    def at_end(self, verdict: Verdict) -> Iterator[Event]:
        """Act at the end of a stretch, whose verdict is not CONTINUE, and yield events."""
        return iter(())

    def describe(self, meta: Meta) -> Meta:
        """Return ``meta`` with what a checkpoint of the current step records of this part."""
        return meta

    def close(self) -> None:
        """Release what this stretch holds."""
