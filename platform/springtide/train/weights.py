"""The first weights of a run, each rank's own part."""

from __future__ import annotations

import torch

from springtide.checkpoint.tensors import box, local, named_tensors
from springtide.model import Decoder, initial


@torch.no_grad()
def initialize(model: Decoder) -> None:
    """Fill what this rank holds of each parameter: no rank ever makes the whole, and the whole does not depend on how many they
    are."""
    for name, tensor in named_tensors(model).items():
        (begin, *_), (rows, *_) = box(tensor)
        name = name.removeprefix("model/")
        local(tensor).copy_(initial(model.config, name, tuple(tensor.shape), begin, begin + rows))
