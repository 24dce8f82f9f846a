"""The initial weights of a run; each rank fills its own part."""

from __future__ import annotations

import torch
from torch import nn

from springtide.checkpoint.adapters import is_adapter
from springtide.checkpoint.tensors import box, local, named_tensors, plain_name
from springtide.config.engine import ModelConfig
from springtide.model import AdaptedLinear, Decoder, converted, fill, make, packed_shapes


@torch.no_grad()
def initialize(
    model: nn.Module, config: ModelConfig, vocab_size: int, eos_id: int | None = None, bos_id: int | None = None
) -> None:
    """Fill this rank's part of each tensor; the whole is the same for any number of ranks. No rank makes the whole of our
    decoder; a user's model is made once more on every rank, with its initial weights."""
    if isinstance(model, Decoder):
        _draw(model, config)
        return
    whole = named_tensors(make(config, vocab_size, eos_id, bos_id))
    for name, tensor in named_tensors(model).items():
        part = tuple(slice(begin, begin + size) for begin, size in zip(*box(tensor), strict=True))
        local(tensor).copy_(whole[name][part])


@torch.no_grad()
def initialize_adapter(model: nn.Module, config: ModelConfig) -> None:
    """Fill this rank's part of the adapter of our decoder, whose other weights are there already."""
    _draw(model, config, only_adapter=True)


def _draw(model: nn.Module, config: ModelConfig, only_adapter: bool = False) -> None:
    packed = {plain_name(name): shape for name, shape in packed_shapes(model).items()}
    for name, tensor in named_tensors(model).items():
        if is_adapter(name) or not only_adapter:
            own = name.removeprefix("model/")
            fill(local(tensor), config, own, packed.get(own, tuple(tensor.shape)), box(tensor).offsets[0])
    for module in model.modules():
        if isinstance(module, AdaptedLinear) and module.magnitude is not None:
            # rows are whole on each rank; in fp64, so that how many it has does not show in the sum
            squares = converted(local(module.weight), module.in_features, torch.float64).square().sum(dim=1)
            local(module.magnitude).copy_(squares.sqrt())
