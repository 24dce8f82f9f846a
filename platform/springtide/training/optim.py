"""The optimizer, the learning rate as a function of tokens, and the gradient norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from springtide.checkpoint.tensors import local
from springtide.config import Config
from springtide.config.engine import OptimConfig
from springtide.config.steps import StepsDone
from springtide.errors import ConfigError, explain
from springtide.model import Decoder
from springtide.training.muon import Muon


def optimizer_of(model: nn.Module, config: OptimConfig, fused: bool = True) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019), or Muon for the matrices of
    ``blocks``; matrices are decayed, vectors are not. Raises ConfigError if Muon finds no such matrices.

    With ``model.base_width`` the matrices of blocks have their own rate. Their decay per step, rate times ``weight_decay``,
    equals that of the others, so weights average over the same number of steps at every width (Wang and Aitchison, "How to
    set AdamW's weight decay as you scale model and dataset size", 2024).

    ``fused`` is faster. On a CPU it rounds the elements that do not fill a vector register differently from the rest, so the
    last bit depends on where shards are cut.
    """
    trained = {id(parameter): parameter for parameter in model.parameters() if parameter.requires_grad}
    wider = model.config.width_multiplier if isinstance(model, Decoder) else 1.0
    apart = config.optimizer == "muon" or wider != 1.0
    blocks = getattr(model, "blocks", nn.ModuleList()) if apart else nn.ModuleList()
    matrices = [parameter for parameter in blocks.parameters() if parameter.dim() == 2 and id(parameter) in trained]
    others = trained.keys() - {id(parameter) for parameter in matrices}
    parameters = [parameter for name, parameter in trained.items() if name in others]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": config.peak_lr, "betas": config.betas, "eps": config.eps}
    options |= {"fused": fused, "foreach": not fused}
    if config.optimizer == "adamw":
        if matrices:
            own = {"lr_scale": 1.0 / wider, "lr": config.peak_lr / wider, "weight_decay": config.weight_decay * wider}
            groups.append({"params": matrices, **own})
        return torch.optim.AdamW(groups, **options)
    if not matrices:
        remedy = "give it ``blocks`` (springtide.model.source), or use adamw"
        raise ConfigError(explain("optim.optimizer", "muon", "finds no matrices in the blocks of this model", remedy))
    return Muon(matrices, groups, config.momentum, config.weight_decay, **options)


def learning_rate(config: OptimConfig, tokens: int, total_tokens: int) -> float:
    """Return the rate of the step that ends at ``tokens`` of ``total_tokens``.

    Linear warm-up; then a half cosine over ``decay`` tokens, or, for wsd, constant and a linear decay at the end
    (Hu et al., MiniCPM, 2024).
    """
    if tokens < config.warmup:
        return config.peak_lr * tokens / config.warmup
    after = total_tokens - config.warmup
    decay = config.decay or (after if config.schedule == "cosine" else total_tokens // 5)
    progress = min(1.0, max(0.0, (tokens - (total_tokens - decay)) / max(decay, 1)))
    shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
    return config.peak_lr * (config.final_lr_ratio + (1.0 - config.final_lr_ratio) * shape)


def rate_after(config: Config, step: StepsDone) -> float:
    """Return the rate of the step after which ``step`` steps are done."""
    return learning_rate(config.optim, config.tokens_after(step), config.tokens_after(config.num_steps))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` in the next step, times the ``lr_scale`` of each parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's shard of every gradient."""
    return [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


def square_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares over this rank's shards, a float64 scalar; over the ranks of a copy these add up to the
    square of the global norm."""
    # in float64, so that the result does not depend on where shards are cut
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
    return torch.stack(norms).pow(2).sum()
