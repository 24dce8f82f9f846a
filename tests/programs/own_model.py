"""A model of a user's own: causal convolutions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from springtide.config.engine import ModelConfig


class Convolutions(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.blocks = nn.ModuleList(nn.Conv1d(config.dim, config.dim, 4) for _ in range(config.num_layers))
        self.head = nn.Linear(config.dim, vocab_size)

    def forward(self, ids_BL: Tensor) -> Tensor:
        x_BDL = self.embedding(ids_BL).transpose(1, 2)
        for block in self.blocks:
            x_BDL = x_BDL + F.gelu(block(F.pad(x_BDL, (3, 0))))
        return self.head(x_BDL.transpose(1, 2))


def build(config: ModelConfig, vocab_size: int, eos_id: int | None, bos_id: int | None) -> nn.Module:
    return Convolutions(config, vocab_size)


def headless(config: ModelConfig, vocab_size: int, eos_id: int | None, bos_id: int | None) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocab_size, config.dim), nn.Flatten())


def nothing(config: ModelConfig, vocab_size: int, eos_id: int | None, bos_id: int | None) -> None:
    return None
