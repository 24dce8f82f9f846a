"""The first weights of a run, each rank's own part."""

from __future__ import annotations

import torch
from torch import nn

from springtide.checkpoint.tensors import box, local, named_tensors
from springtide.config.engine import ModelConfig
from springtide.model import Decoder, initial, make


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, vocab_size: int, eos_id: int | None = None) -> None:
    """Fill what this rank holds of each tensor; the whole does not depend on how many ranks there are. Of our decoder no rank
    makes the whole; a user's model is made once more, as it began."""
    whole = {} if isinstance(model, Decoder) else named_tensors(make(config, vocab_size, eos_id))
    for name, tensor in named_tensors(model).items():
        offsets, sizes = box(tensor)
        if whole:
            part = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
            local(tensor).copy_(whole[name][part])
        else:
            begin, rows = offsets[0], sizes[0]
            name = name.removeprefix("model/")
            local(tensor).copy_(initial(config, name, tuple(tensor.shape), begin, begin + rows))
