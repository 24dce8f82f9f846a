"""LAMB, against the paper's algorithm written out in float64."""

from __future__ import annotations

import numpy as np
import torch

from springtide.config import Tokens
from springtide.config.engine import ModelConfig, OptimConfig
from springtide.model import build
from springtide.optim.build import optimizer_of
from springtide.optim.schedule import set_learning_rate

BETAS, EPS, DECAY, RATE = (0.9, 0.95), 1e-8, 0.1, 0.01


def by_the_paper(weight: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """You et al. (2020), algorithm 2, phi the identity; a vector has neither decay nor a layer's ratio."""
    m = v = np.zeros_like(weight)
    for step, gradient in enumerate(gradients, 1):
        m = BETAS[0] * m + (1 - BETAS[0]) * gradient
        v = BETAS[1] * v + (1 - BETAS[1]) * gradient**2
        update = (m / (1 - BETAS[0] ** step)) / (np.sqrt(v / (1 - BETAS[1] ** step)) + EPS)
        ratio = 1.0
        if weight.ndim >= 2:
            update = update + DECAY * weight
            if np.linalg.norm(weight) > 0:
                ratio = np.linalg.norm(weight) / np.linalg.norm(update)
        weight = weight - RATE * ratio * update
    return weight


def test_lamb_is_the_papers_algorithm() -> None:
    sizes = ModelConfig(num_layers=1, dim=32, num_heads=2, num_kv_heads=1, ffn_dim=48)
    model = build(sizes, 100)
    with torch.no_grad():
        model.blocks[0].ffn.down.weight.zero_()  # a ratio of 0 / 0: the first step is Adam's
    config = OptimConfig(optimizer="lamb", peak_lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, warmup=Tokens(0))
    optimizer = optimizer_of(model, config)
    set_learning_rate(optimizer, RATE)
    generator = torch.Generator().manual_seed(1)
    begun = {name: one.detach().double().numpy().copy() for name, one in model.named_parameters()}
    gradients = {
        name: [torch.randn(one.shape, generator=generator) * 10 ** (step - 2) for step in range(4)]
        for name, one in model.named_parameters()
    }
    for step in range(4):
        for name, one in model.named_parameters():
            one.grad = gradients[name][step]
        optimizer.step()
    for name, one in model.named_parameters():
        expected = by_the_paper(begun[name], [each.double().numpy() for each in gradients[name]])
        moved = np.linalg.norm(expected - begun[name])
        assert np.linalg.norm(one.detach().double().numpy() - expected) < 1e-5 * moved, name
