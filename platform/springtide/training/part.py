"""The class ``Part``, the interface through which a feature hooks into the steps of a worker group. The step and the loop know
parts only through it.

Each method is called on every rank, on one part after the other, in the order of ``parts.py``. Method, then when it is called
and what it may do:

    begin            after the state is restored: a stretch of training (the steps between two restores) begins
    at_start         once, before the first step of the worker group
    before_step      the step's batch has arrived
    wrap_compute     before forward: wrap the function that computes each micro-batch of this step
    contribute       after backward: add fields to the step's message (the step's one all-reduce)
    receive          after the all-reduce: read its sums; may change the gradient norm and add metrics
    add_gradients    after clipping: add terms to the gradients
    before_update    before the weights change: wait for running copies of the weights, such as for a save
    allows_update    return False to skip the update of the weights
    verdict          return what training does after this step: continue, roll back, leave, stop or finish
    after_step       after every step
    between_steps    after a step whose verdict is CONTINUE: the weights may be copied
    at_end           when the stretch ends
    describe         when the metadata of a checkpoint is made: add this part's state
    close            when the stretch ends, also after an error, in reverse order: release resources
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
    """What training does after a step. Each part returns a verdict, and the largest one, in the numeric order below, wins."""

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
    """The input of one rank in a step."""

    rows: Tensor
    """This rank's rows of token ids on its device, int64 (n, L + 1). A token that the loss ignores is ``~id``, a negative
    number (``shards.signed``)."""
    micro_batches: Sequence[slice]
    """Slices of ``rows``, some of them empty. Every rank has the same number."""
    tokens_per_step: int
    """Number of tokens of a step over all ranks, including tokens that the loss ignores."""
    padded_rows: int = 0
    """Number of rows to which each micro-batch is padded; 0 pads only an empty micro-batch."""
    sample_ids: np.ndarray = dataclasses.field(default_factory=lambda: _NO_SAMPLES)
    """Sample id of each row, uint64 (n,)."""
    columns: Mapping[str, Tensor] = dataclasses.field(default_factory=lambda: NO_COLUMNS)
    """Label columns of the rows by name, (n, ...) each: inputs of a custom objective."""
    seeds: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Index of a lane's first row -> seed of the random number generators there (``lane_seeds``). A lane is a fixed share of
    every batch."""
    step: StepsDone = _NONE_DONE
    """Steps done before this one."""
    name: str = "a step"
    """Name of the step in error messages."""
    data_wait_s: float = 0.0
    """How long this rank waited for its batch [s]."""


@dataclasses.dataclass(frozen=True)
class Share:
    """What one rank has computed in a step, after backward."""

    work: Work
    sums: Tensor
    """Summed cross-entropy of this rank's rows in nats, float64 (1,). With a custom objective: the objective's sums,
    (size,)."""
    row_nats: Tensor | None
    """Cross-entropy of each row, float64 (n,); None with an objective."""
    row_tokens: Tensor
    """Predicted tokens of each row, float64 (n,)."""
    gradients: list[Tensor]
    """This rank's shards of the gradients."""
    loss_weight: float
    """Factor of the loss before backward: ``gradients`` are the gradients of the summed loss times this factor."""


@dataclasses.dataclass
class StepResult:
    """Result of a step, the same on every rank."""

    loss: float
    """Loss in nats per token. With a custom objective: the objective's sum divided by its total weight."""
    grad_norm: float
    tokens: int
    digest: int
    """64-bit digest of the sample ids of all ranks."""
    agreed: Agreed = dataclasses.field(default_factory=Agreed)
    """All fields of the step's message (its one all-reduce), summed over ranks."""
    correction: float = 1.0
    """``Share.gradients`` times this factor are the gradients of the loss per token."""
    requests: frozenset[GroupRequest] = frozenset()
    """Requests to the group, such as to save or stop, that any rank received since the previous step."""
    updated: bool = True
    """True if the weights were updated, False if the update was skipped."""
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    """Metrics that only some runs report (``events.metrics.EXTRA_METRICS``)."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of the event ``StepDone``, by name."""


@dataclasses.dataclass(frozen=True)
class DoneStep:
    """A finished step. All fields but the times are the same on every rank."""

    step: StepsDone
    """Steps done, including this one."""
    result: StepResult
    learning_rate: float
    step_time_s: float
    """Time from the end of the previous step to the end of this one [s]."""
    data_wait_s: float
    """How long this rank waited for its batch [s]."""
    verdict: Verdict = Verdict.CONTINUE


class Part:
    """Base class of features that hook into training. All methods are no-ops; override the ones you need."""

    started: Mapping[str, Any] = {}
    """Fields that this part adds to the event ``Started``, by name."""

    def begin(self, found: Restored | None) -> None:
        """Begin a stretch of training (the steps between two restores). ``found``: the restored state from which training
        continues; None for new weights."""

    def at_start(self) -> Iterator[Event]:
        """Do what this part does before the first step of a worker group, and yield events. Not called again after a
        rollback."""
        return iter(())

    def before_step(self, work: Work) -> None:
        """Prepare this part for the step whose input is ``work``."""

    def wrap_compute(self, compute: Compute) -> Compute:
        """Return ``compute``, which computes a micro-batch, or a wrapper of it. It is used for each micro-batch of this
        step."""
        return compute

    def contribute(self, message: StepMessage, share: Share) -> None:
        """Add fields to the step's message, an all-reduce over ranks: the same names, kinds and lengths in each step and on
        each rank. Must not block."""

    def receive(self, result: StepResult) -> None:
        """Read the all-reduced fields of this step, which are the same on all ranks, before the weights change."""

    def add_gradients(self, clip: float) -> None:
        """Add this part's own terms to the gradients, which clipping has multiplied by ``clip`` (at most 1)."""

    def before_update(self) -> None:
        """Wait until the weights may change: running copies of the weights, such as for a save, must be complete."""

    def allows_update(self, result: StepResult) -> bool:
        """Return True if this step may update the weights. Must return the same on every rank."""
        return True

    def verdict(self, result: StepResult) -> Verdict:
        """Return what training does after this step, such as continue or roll back. Must return the same on every rank."""
        return Verdict.CONTINUE

    def after_step(self, done: DoneStep) -> Iterator[Event]:
        """Yield this part's events after the step ``done``."""
        return iter(())

    def between_steps(self, done: DoneStep) -> Iterator[Event]:
        """Do what this part does between two steps, and yield events. Called after a step only if training continues (verdict
        CONTINUE)."""
        return iter(())

    def at_end(self, verdict: Verdict) -> Iterator[Event]:
        """Do what this part does at the end of a stretch of training (before a rollback, or when the group ends), and yield
        events. ``verdict``: why training ends here, never CONTINUE."""
        return iter(())

    def describe(self, meta: Meta) -> Meta:
        """Return ``meta``, the metadata of a checkpoint of the current step, with this part's state added."""
        return meta

    def close(self) -> None:
        """Release the resources that this part has used since ``begin``. Called after an error, too."""
