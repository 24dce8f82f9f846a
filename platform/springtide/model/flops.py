"""What a model costs: parameters, and floating-point operations for a token."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor, nn

from springtide.config.engine import ModelConfig
from springtide.model.decoder import Decoder
from springtide.model.frozen import packed_shapes


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Return the model FLOPs to train on one token, forward and backward.

    6 for each weight that multiplies (the head counts, the embedding's look-up does not), 4 if it is frozen, plus the causal
    half of attention's two matmuls, 12 * width of all heads * mean number of keys in each layer (Chowdhery et al., PaLM, 2022,
    appendix B, less what the mask and windows spare). The attention of a user's own model is unknown, so it is not counted.
    """
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matmul = sum(_flops(p, n) for p, n in _counted(model) if p.dim() >= 2 and id(p) not in looked_up)
    if not isinstance(model, Decoder):
        return matmul
    config = model.config
    if config.tied_head:
        matmul += _flops(model.head.weight, model.head.weight.numel())
    return matmul + 12.0 * _attended(config, sequence_length) * config.num_heads * config.head_width


def _flops(weight: Tensor, count: int) -> float:
    """Return the FLOPs of ``count`` weights for a token: their product, the gradient of its input, and their own gradient if
    they train."""
    return (6.0 if weight.requires_grad else 4.0) * count


def _counted(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield each parameter and the number of its weights, which packed ones have more of than bytes."""
    packed = packed_shapes(model)
    for name, parameter in model.named_parameters():
        yield parameter, math.prod(packed.get(name, parameter.shape))


def _attended(config: ModelConfig, sequence_length: int) -> float:
    """Return how many tokens a token attends to on average, summed over all layers."""
    windows = (min(config.window_of(layer) or sequence_length, sequence_length) for layer in range(config.num_layers))
    return sum(window - window**2 / (2 * sequence_length) for window in windows)


def hardware_flops_per_token(model: nn.Module, sequence_length: int, recompute: str) -> float:
    """Return the FLOPs that a device does for one token: those of the model, and another forward of the blocks where all of
    a block is recomputed (``recompute`` "full"; what "selective" repeats is small). The masked half of attention and what
    fused kernels repeat internally are not counted (Korthikanti et al., "Reducing activation recomputation", 2022)."""
    flops = flops_per_token(model, sequence_length)
    blocks = getattr(model, "blocks", None)
    if recompute != "full" or blocks is None:
        return flops
    again = 2.0 * sum(count for p, count in _counted(blocks) if p.dim() >= 2)
    if isinstance(model, Decoder):
        config = model.config
        again += 4.0 * _attended(config, sequence_length) * config.num_heads * config.head_width
    return flops + again


def num_parameters(model: nn.Module) -> int:
    """Return the number of parameters, shared ones counted once."""
    return sum(count for _, count in _counted(model))
