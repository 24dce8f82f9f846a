"""A Llama-style decoder in one file: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shape suffixes: B rows, L positions, D width, H query heads, K key/value heads, E head width, F hidden width, V ids.
The model knows nothing of ranks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from springtide.config.schema import ModelConfig

VOCAB_MULTIPLE = 64
"""The embedding is padded to a multiple of this, so that it shards evenly and its matmuls are fast."""


class RMSNorm(nn.Module):
    """Zhang and Sennrich, "Root mean square layer normalization" (2019); computed in fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D), type kept."""
        x32 = x.float()
        scaled = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight.float()).type_as(x)


def rotary_table(head_dim: int, length: int, theta: float, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of Su et al., "RoFormer" (2021), fp32 (length, head_dim / 2) each."""
    rates = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * rates
    return angles.cos(), angles.sin()


def rotate(x_BHLE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (e, e + E / 2) by its position's angle; the tables are (L, E / 2), or (B, 1, L, E / 2)."""
    first, second = x_BHLE.chunk(2, dim=-1)
    cos, sin = cos.type_as(x_BHLE), sin.type_as(x_BHLE)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def documents(tokens_BL: Tensor, separator: int) -> tuple[Tensor, Tensor]:
    """The position of each token in its own document, int64 (B, L), and who may attend to whom, bool (B, 1, L, L).

    A document ends with ``separator``, the end of text; a row that begins inside one counts from its own beginning.
    """
    index_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    begins_BL = F.pad(tokens_BL[:, :-1] == separator, (1, 0))
    first_BL = torch.where(begins_BL, index_L, 0).cummax(dim=1).values
    together_BLL = first_BL[:, :, None] == first_BL[:, None, :]
    return index_L - first_BL, (together_BLL & (index_L[:, None] >= index_L)).unsqueeze(1)


class Attention(nn.Module):
    """Causal self-attention; K key/value heads serve H query heads (Ainslie et al., "GQA", 2023)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.dim // config.num_heads
        self.query = nn.Linear(config.dim, self.num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.dim, self.num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.dim, self.num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(self.num_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x_BLD: Tensor, cos: Tensor, sin: Tensor, mask_B1LL: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D); tables as for ``rotate``; without a mask, plainly causal."""
        B, L, _ = x_BLD.shape
        q_BHLE = self.query(x_BLD).view(B, L, self.num_heads, self.head_dim).transpose(1, 2)
        k_BKLE = self.key(x_BLD).view(B, L, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v_BKLE = self.value(x_BLD).view(B, L, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q_BHLE, k_BKLE = rotate(q_BHLE, cos, sin), rotate(k_BKLE, cos, sin)
        grouped = self.num_heads != self.num_kv_heads
        y_BHLE = F.scaled_dot_product_attention(
            q_BHLE, k_BKLE, v_BKLE, attn_mask=mask_B1LL, is_causal=mask_B1LL is None, enable_gqa=grouped
        )
        return self.out(y_BHLE.transpose(1, 2).reshape(B, L, -1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, "GLU variants improve transformer", 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BLD)) * self.up(x_BLD))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x_BLD: Tensor, cos: Tensor, sin: Tensor, mask_B1LL: Tensor | None = None) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), cos, sin, mask_B1LL)
        return x_BLD + self.ffn(self.ffn_norm(x_BLD))


class Decoder(nn.Module):
    """Token ids (B, L) -> logits (B, L, V), V being ``vocab_size`` rounded up to a multiple of 64."""

    def __init__(self, config: ModelConfig, vocab_size: int, separator: int | None = None) -> None:
        """``separator``: the id that ends a document, where documents of one row shall not see each other."""
        super().__init__()
        self.config, self.vocab_size, self.separator = config, vocab_size, separator
        self.padded_vocab_size = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.embedding = nn.Embedding(self.padded_vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, self.padded_vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        # rebuilt from the config, so it is no part of a checkpoint
        cos, sin = rotary_table(config.dim // config.num_heads, config.max_sequence_length, config.rope_theta)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """(B, L) ids -> (B, L, V) logits."""
        length = tokens_BL.shape[1]
        cos, sin, mask_B1LL = self.cos[:length], self.sin[:length], None
        if self.separator is not None:
            position_BL, mask_B1LL = documents(tokens_BL, self.separator)
            cos, sin = self.cos[position_BL].unsqueeze(1), self.sin[position_BL].unsqueeze(1)
        x_BLD = self.embedding(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD, cos, sin, mask_B1LL)
        return self.head(self.norm(x_BLD))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal weights, the same on every rank and at any world size; residual outputs are scaled by depth
        (Radford et al., GPT-2, 2019)."""
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                std = residual if name.endswith(("attention.out.weight", "ffn.down.weight")) else 0.02
                parameter.copy_(torch.normal(0.0, std, parameter.shape, generator=generator))


def build(config: ModelConfig, vocab_size: int, separator: int | None = None) -> Decoder:
    """The decoder with its initial weights, on the CPU."""
    model = Decoder(config, vocab_size, separator)
    model.init_weights(config.init_seed)
    return model


def flops_per_token(model: Decoder, sequence_length: int) -> float:
    """Model FLOPs to train on one token, forward and backward.

    6 for each weight that multiplies (the head counts, the embedding's look-up does not) plus the causal half of
    attention's two matmuls, 6 * layers * length * dim (Chowdhery et al., PaLM, 2022, appendix B, halved for the mask).
    """
    config = model.config
    matmul = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
    if config.tied_head:
        matmul += model.head.weight.numel()
    return 6.0 * matmul + 6.0 * config.num_layers * sequence_length * config.dim


def num_parameters(model: nn.Module) -> int:
    """Parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
