"""The learning rate as a function of the trained tokens, so that it does not depend on the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from springtide.config.engine import OptimConfig
from springtide.errors import look_up

_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "wsd": lambda progress: 1.0 - progress,
    "wsd_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Value of ``optim.schedule`` -> function of the progress of the decay, 0 to 1. It returns the height of the rate between peak
and final rate: 1 at the peak rate, 0 at the final rate."""


def learning_rate(config: OptimConfig, tokens: int, total_tokens: int) -> float:
    """Return the learning rate of one step. ``tokens``: tokens trained after this step. ``total_tokens``: tokens of the whole
    run. ``optim.schedule_begin`` is added to both numbers.

    The warm-up is linear. Over the last ``decay`` tokens the rate falls in the shape of ``schedule``: a half cosine, linear (to
    zero: Bergsma et al., "Straight to zero", 2025; after a constant part: Hu et al., MiniCPM, 2024), or 1 - sqrt (Haegele et
    al., "Scaling laws and compute-optimal training beyond fixed training durations", 2024).
    """
    before = int(config.schedule_begin)
    tokens, total_tokens = before + tokens, before + total_tokens
    if tokens < config.warmup:
        return config.peak_lr * tokens / config.warmup
    constant = config.schedule.startswith("wsd")
    decay = config.decay or (total_tokens // 5 if constant else total_tokens - config.warmup)
    progress = min(1.0, max(0.0, (tokens - (total_tokens - decay)) / max(decay, 1)))
    left = look_up(_SHAPES, "optim.schedule", config.schedule)(progress)
    return config.peak_lr * (config.final_lr_ratio + (1.0 - config.final_lr_ratio) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of each parameter group in the next step: ``rate`` times the group's ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
