"""The state of training between two steps: model, optimizer and counters, their checkpoint, and the initial weights."""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import Tensor, nn

from springtide.checkpoint import branch
from springtide.checkpoint.adapters import is_adapter
from springtide.checkpoint.format import Meta
from springtide.checkpoint.restore import Restored
from springtide.checkpoint.tensors import box, local, named_tensors, plain_name
from springtide.config import Config, code_fingerprint
from springtide.config.engine import ModelConfig
from springtide.config.steps import OrderStep, StepsDone, one_more
from springtide.distributed import World
from springtide.model import (
    AdaptedLinear,
    Decoder,
    converted,
    fill,
    flops_per_token,
    hardware_flops_per_token,
    make,
    num_parameters,
    packed_shapes,
)
from springtide.optim.schedule import learning_rate
from springtide.stream import Data
from springtide.stream.chain import next_chain, with_skipped_update
from springtide.training.device import peak_flops
from springtide.training.part import StepResult


@dataclasses.dataclass(frozen=True)
class ModelFigures:
    """Size of the model, its FLOPs per token, and the peak FLOP/s of its device."""

    num_parameters: int
    flops_per_token: float
    """FLOPs of the model per token, without recomputation (the numerator of MFU)."""
    hardware_flops_per_token: float
    """FLOPs that the device computes per token, with recomputation."""
    peak_flops: float = 0.0
    """Peak of one device [FLOP/s]."""
    peak_source: str = ""

    @classmethod
    def of(cls, model: nn.Module, sequence_length: int, recompute: str) -> ModelFigures:
        """Return the figures of a model that is not sharded yet. ``peak_flops`` stays 0 until ``on`` is called."""
        hardware = hardware_flops_per_token(model, sequence_length, recompute)
        return cls(num_parameters(model), flops_per_token(model, sequence_length), hardware)

    def on(self, device: torch.device) -> ModelFigures:
        """Return these figures with the device's peak, which may have to be measured."""
        peak, source = peak_flops(device)
        return dataclasses.replace(self, peak_flops=peak, peak_source=source)


@dataclasses.dataclass
class TrainState:
    """Everything that a step changes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    config_fingerprint: str
    step: StepsDone = dataclasses.field(default=StepsDone(0))
    """Steps done. The data needs no other state: the order of samples is a function of the step."""
    tokens: int = 0
    chain: str = ""
    """Hash over all steps done, in which each step continues the hash of the steps before it (``stream.chain``); empty before
    the first step."""
    skipped_updates: tuple[OrderStep, ...] = ()
    """Steps whose update of the weights was skipped, as indexes in the data order: the newest 1000 of them."""
    tokens_before: int = 0
    """Tokens that the optimizer was trained on before step 0, in earlier training stages. The moving average of the weights
    counts these tokens, too."""

    def begin(self, config: Config, data: Data) -> None:
        """Begin at step 0 with new weights."""
        self.step, self.tokens, self.chain, self.skipped_updates = StepsDone(0), 0, "", ()
        self.tokens_before = 0
        initialize(self.model, config.model, data.vocab_size, data.eos_id, data.bos_id)
        self.optimizer.state.clear()  # drop optimizer state left by a partially read snapshot

    def resume(self, found: Restored) -> None:
        """Continue from the step at which ``found`` was saved. Its tensors are already in the model and the optimizer."""
        meta = found.meta
        self.step, self.tokens, self.chain, self.skipped_updates = (
            meta.step,
            meta.tokens,
            meta.chain,
            meta.skipped_updates,
        )
        self.tokens_before = branch.tokens_before(meta)

    def advance(self, step: OrderStep, result: StepResult) -> None:
        """Count a step that has been trained. ``step``: its index in the data order."""
        self.step = one_more(self.step)
        self.tokens += result.tokens
        self.chain = next_chain(self.chain, step, result.digest, result.tokens, result.updated)
        if not result.updated:
            self.skipped_updates = with_skipped_update(self.skipped_updates, step)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint of the current step."""
        return named_tensors(self.model, self.optimizer)

    def meta(self, data: Data, world: World, labels: dict[str, str]) -> Meta:
        """Return the metadata of a checkpoint of the current step, without the metadata that parts add."""
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
            components=branch.components_of(self.tokens_before),
            labels=labels,
        )


def rate_after(config: Config, step: StepsDone) -> float:
    """Return the learning rate of the ``step``-th step, counted from 1."""
    return learning_rate(config.optim, config.tokens_after(step), config.tokens_after(config.num_steps))


# The initial weights of a run. Each rank fills its own shards.


@torch.no_grad()
def initialize(
    model: nn.Module, config: ModelConfig, vocab_size: int, eos_id: int | None = None, bos_id: int | None = None
) -> None:
    """Fill this rank's shard of each tensor with initial weights. The whole tensors are the same for any number of ranks.

    No rank holds all weights of our decoder. A user's model is built a second time, whole, on every rank, and each rank copies
    its shards from this whole model."""
    if isinstance(model, Decoder):
        _draw(model, config)
        return
    whole = named_tensors(make(config, vocab_size, eos_id, bos_id))
    for name, tensor in named_tensors(model).items():
        part = tuple(slice(begin, begin + size) for begin, size in zip(*box(tensor), strict=True))
        local(tensor).copy_(whole[name][part])


@torch.no_grad()
def initialize_adapter(model: nn.Module, config: ModelConfig) -> None:
    """Fill this rank's shard of each adapter tensor of our decoder. The decoder's other weights have been loaded already."""
    _draw(model, config, only_adapter=True)


def _draw(model: nn.Module, config: ModelConfig, only_adapter: bool = False) -> None:
    packed = {plain_name(name): shape for name, shape in packed_shapes(model).items()}
    for name, tensor in named_tensors(model).items():
        if is_adapter(name) or not only_adapter:
            own = name.removeprefix("model/")
            fill(local(tensor), config, own, packed.get(own, tuple(tensor.shape)), box(tensor).offsets[0])
    for module in model.modules():
        if isinstance(module, AdaptedLinear) and module.magnitude is not None:
            # rows are not split between ranks. Sum in fp64, so that the norm of a row does not depend on how many rows the rank
            # has
            squares = converted(local(module.weight), module.in_features, torch.float64).square().sum(dim=1)
            local(module.magnitude).copy_(squares.sqrt())
