"""The state of training between two steps: what is trained, how far it is, and what a checkpoint holds of it."""

from __future__ import annotations

import dataclasses
import math
import time

import torch
from torch import Tensor, nn

from springtide.checkpoint import branch
from springtide.checkpoint.agreed import components_of
from springtide.checkpoint.format import Meta
from springtide.checkpoint.restore import Restored
from springtide.checkpoint.tensors import named_tensors
from springtide.config import Config, code_fingerprint
from springtide.config.steps import OrderStep, StepsDone, one_more
from springtide.dist import World
from springtide.model import flops_per_token, hardware_flops_per_token, num_parameters
from springtide.objective import Objective
from springtide.stream import Data
from springtide.stream.chain import next_chain, with_skipped_update
from springtide.training.anchor import Anchor
from springtide.training.energy import Counter, EnergyMeter
from springtide.training.forgetting import FirstLosses
from springtide.training.peak_flops import peak_flops
from springtide.training.source_figures import SourceFigures
from springtide.training.step import StepResult
from springtide.training.step_guard import StepGuard
from springtide.training.step_metrics import StepMetrics
from springtide.training.teacher import Teacher
from springtide.training.weights import initialize


@dataclasses.dataclass(frozen=True)
class ModelFigures:
    """What is known of a model and its device before the first step."""

    num_parameters: int
    flops_per_token: float
    """The model's arithmetic, recomputation excluded."""
    hardware_flops_per_token: float
    """What the device computes, recomputation included."""
    peak_flops: float = 0.0
    """Peak of one device [FLOP/s]."""
    peak_source: str = ""

    @classmethod
    def of(cls, model: nn.Module, sequence_length: int, recompute: str) -> ModelFigures:
        """Return the figures of a model that is not laid out yet."""
        hardware = hardware_flops_per_token(model, sequence_length, recompute)
        return cls(num_parameters(model), flops_per_token(model, sequence_length), hardware)

    def on(self, device: torch.device) -> ModelFigures:
        """Return these figures with the device's peak, which may have to be measured."""
        peak, source = peak_flops(device)
        return dataclasses.replace(self, peak_flops=peak, peak_source=source)


@dataclasses.dataclass
class TrainState:
    """What a step changes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    guard: StepGuard
    config_fingerprint: str
    objective: Objective | None = None
    """What is minimised, if not the cross-entropy of next tokens."""
    metrics: StepMetrics | None = None
    """What is told with each step on request."""
    anchor: Anchor | None = None
    """What keeps the weights near those that the run starts from."""
    teacher: Teacher | None = None
    """What computes labels in each step."""
    step: StepsDone = dataclasses.field(default=StepsDone(0))
    """Steps done: all of the data state."""
    tokens: int = 0
    chain: str = ""
    """The chain of these steps; empty before the first."""
    skipped_updates: tuple[OrderStep, ...] = ()
    """Steps of the order whose update the step guard skipped, the newest 1000."""
    tokens_before: int = 0
    """Tokens that the optimizer was trained on before step 0, in earlier stages; averaged weights count them."""
    agreed_step: StepsDone | None = None
    """Steps done when all devices last agreed (``training/recheck.py``); None if they are not checked."""
    losses_since_save: tuple[float, int] = (0.0, 0)
    """Sum and number of the finite ones."""
    first_losses: FirstLosses = dataclasses.field(default_factory=FirstLosses)
    """Those at step 0 of the held-out sets of the run whose weights this one started from."""
    heldout_losses: dict[StepsDone, float] = dataclasses.field(default_factory=dict)
    """Step -> held-out loss, of this trajectory alone."""
    sources: SourceFigures = dataclasses.field(default_factory=SourceFigures)
    """What is told of each source; not part of a checkpoint, because it follows from the step."""
    energy: EnergyMeter = dataclasses.field(default_factory=lambda: EnergyMeter(Counter("", lambda: 0.0)))
    """Counts this rank's joules; at first, one that counts none."""

    def begin(self, config: Config, data: Data) -> None:
        """Begin at step 0 with new weights."""
        self.step, self.tokens, self.chain, self.skipped_updates = StepsDone(0), 0, "", ()
        self.agreed_step, self.tokens_before = None, 0
        self.heldout_losses.clear()
        initialize(self.model, config.model, data.vocab_size, data.eos_id, data.bos_id)
        self.optimizer.state.clear()  # of a snapshot that could not be read to its end

    def resume(self, found: Restored) -> None:
        """Continue where ``found`` was saved; its tensors are in the model and the optimizer already."""
        meta = found.meta
        for one in self._read_at_start:
            one.check_unchanged(meta)
        self.step, self.tokens, self.chain, self.skipped_updates = (
            meta.step,
            meta.tokens,
            meta.chain,
            meta.skipped_updates,
        )
        self.agreed_step, self.tokens_before = found.agreed_step, branch.tokens_before(meta)
        first = FirstLosses.in_state(meta)
        self.first_losses = first if first.losses else self.first_losses
        self.heldout_losses.clear()  # after a rollback they are those of other weights
        if "heldout_loss" in meta.metrics:
            self.heldout_losses[meta.step] = meta.metrics["heldout_loss"]
        self.guard.load(meta.components)

    @property
    def _read_at_start(self) -> list[Anchor | Teacher]:
        """What comes from checkpoints of other runs, whose digests every checkpoint has."""
        return [one for one in (self.anchor, self.teacher) if one is not None]

    def advance(self, step: OrderStep, result: StepResult) -> None:
        """Count a step: ``step`` of the order is trained."""
        self.step = one_more(self.step)
        self.tokens += result.tokens
        self.chain = next_chain(self.chain, step, result.digest, result.tokens, result.updated)
        if not result.updated:
            self.skipped_updates = with_skipped_update(self.skipped_updates, step)
        if math.isfinite(result.loss):
            total, number = self.losses_since_save
            self.losses_since_save = total + result.loss, number + 1

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint of the current step."""
        return named_tensors(self.model, self.optimizer)

    def meta(self, data: Data, world: World, labels: dict[str, str]) -> Meta:
        """Return the metadata of a checkpoint of the current step."""
        total, number = self.losses_since_save
        metrics = {"loss": total / number} if number else {}
        if self.step in self.heldout_losses:
            metrics["heldout_loss"] = self.heldout_losses[self.step]
        others = branch.components_of(self.tokens_before) | self.first_losses.components
        for one in self._read_at_start:
            others |= one.components
        return Meta(
            step=self.step,
            tokens=self.tokens,
            chain=self.chain,
            skipped_updates=self.skipped_updates,
            world_size=world.size,
            order_identity=data.order.identity_at(self.step),
            config_fingerprint=self.config_fingerprint,
            code_fingerprint=code_fingerprint(),
            tokenizer_digest=data.tokenizer_digest,
            saved_s=time.time(),
            metrics=metrics,
            components=self.guard.state() | components_of(self.agreed_step) | others,
            labels=labels,
        )
