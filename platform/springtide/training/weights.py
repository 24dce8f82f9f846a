"""The initial weights of a run; each rank fills its own part."""

from __future__ import annotations

import torch
from torch import nn

from springtide.checkpoint.tensors import box, local, named_tensors
from springtide.config.engine import ModelConfig
from springtide.model import Decoder, initial, make


@torch.no_grad()
def initialize(
    model: nn.Module, config: ModelConfig, vocab_size: int, eos_id: int | None = None, bos_id: int | None = None
) -> None:
    """Fill this rank's part of each tensor; the whole is the same for any number of ranks. No rank makes the whole of our
    decoder; a user's model is made once more on every rank, with its initial weights."""
    whole = {} if isinstance(model, Decoder) else named_tensors(make(config, vocab_size, eos_id, bos_id))
    for name, tensor in named_tensors(model).items():
        offsets, sizes = box(tensor)
        if whole:
            part = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
            local(tensor).copy_(whole[name][part])
        else:
            begin, rows = offsets[0], sizes[0]
            name = name.removeprefix("model/")
            local(tensor).copy_(initial(config, name, tuple(tensor.shape), begin, begin + rows))
