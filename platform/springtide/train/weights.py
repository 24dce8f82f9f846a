"""The first weights of a run, each rank's own part."""

from __future__ import annotations

import torch

from springtide.checkpoint.tensors import box, local
from springtide.model import Decoder, initial


@torch.no_grad()
def initialize(model: Decoder) -> None:
    """Fill what this rank holds of each parameter: no rank ever makes the whole, and the whole does not depend on how many they
    are."""
    for name, parameter in model.named_parameters():
        (begin, *_), (rows, *_) = box(parameter)
        local(parameter).copy_(initial(model.config, name, tuple(parameter.shape), begin, begin + rows))
