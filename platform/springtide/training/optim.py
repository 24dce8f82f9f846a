"""The optimizer, the learning rate as a function of tokens, and clipping by the global norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from springtide.checkpoint.tensors import local
from springtide.config import Config
from springtide.config.engine import OptimConfig
from springtide.errors import ConfigError, explain
from springtide.model import Decoder
from springtide.training.muon import Muon


def optimizer_of(model: nn.Module, config: OptimConfig, fused: bool = True) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019), or Muon for the matrices of ``blocks``;
    matrices are decayed, vectors are not. ConfigError when Muon finds no such matrices.

    With ``model.base_width`` the matrices of blocks have a rate of their own. Their decay a step, rate times ``weight_decay``,
    stays that of the others, so that weights are averages over as many steps at every width (Wang and Aitchison, "How to set
    AdamW's weight decay as you scale model and dataset size", 2024).

    ``fused`` is faster. On a CPU it rounds the elements that do not fill a vector register otherwise than the rest, so that
    where the shards are cut shows in the last bit.
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
    """The rate of the step that ends at ``tokens`` of ``total_tokens``.

    Linear warm-up; then a half cosine over ``decay`` tokens, or, for wsd, stable and a linear decay at the end
    (Hu et al., MiniCPM, 2024).
    """
    if tokens < config.warmup:
        return config.peak_lr * tokens / config.warmup
    after = total_tokens - config.warmup
    decay = config.decay or (after if config.schedule == "cosine" else total_tokens // 5)
    progress = min(1.0, max(0.0, (tokens - (total_tokens - decay)) / max(decay, 1)))
    shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
    return config.peak_lr * (config.final_lr_ratio + (1.0 - config.final_lr_ratio) * shape)


def rate_after(config: Config, step: int) -> float:
    """The rate of the step after which ``step`` are done."""
    return learning_rate(config.optim, config.tokens_after(step), config.tokens_after(config.num_steps))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` in the next step, times what a group of parameters has for ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's shard of every gradient."""
    return [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


def square_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squares over this rank's shards, a float64 scalar; over the ranks of a copy it adds up to the global norm's."""
    # in float64, so that where the shards are cut does not show
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
    return torch.stack(norms).pow(2).sum()
