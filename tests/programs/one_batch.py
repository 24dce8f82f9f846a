"""A model of known weights, and its gradients of one batch of known ids."""

from __future__ import annotations

import torch
from torch import nn

from springtide.checkpoint.tensors import local


def draw_weights(model: nn.Module) -> torch.Generator:
    """Fill this rank's shards with the same numbers each time; the generator of further ones."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).normal_(0.0, 0.1, generator=generator)
    return generator


def three_rows(generator: torch.Generator) -> torch.Tensor:
    """Ids of three rows of 32 tokens and their targets."""
    return torch.randint(256, (3, 33), generator=generator)


def backward_of_one_batch(model: nn.Module) -> float:
    """The loss of three rows at known weights; the gradients of its mean are the model's then."""
    ids = three_rows(draw_weights(model))
    total, _ = model(ids[:, :-1], ids[:, 1:])
    (total / 96).backward()
    return float(total.item())
