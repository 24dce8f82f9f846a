"""A decoder in one file: RMSNorm, rotary positions, grouped-query attention, a gated feed-forward. Its options make it a
Llama, a Qwen or a Gemma.

Shape suffixes: B rows, L positions, D width, H query heads, K key/value heads, E head width, F hidden width, V ids.
The model knows nothing about ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from springtide.config.engine import ModelConfig
from springtide.model.loss import LargestLogit, head_loss, token_nats

VOCAB_MULTIPLE = 64
"""The embedding is padded to a multiple of this, so that it shards evenly and its matmuls are fast."""
_STD = 0.02
_RESIDUAL = ("attention.out.weight", "ffn.down.weight")
_INIT_ROWS = 64
"""Rows that are drawn with one seed."""
_REPEATS_HEADS = {"cpu": False, "cuda": True}
"""Whether the attention kernels of a device need a key/value head for each query head."""


class RMSNorm(nn.Module):
    """Zhang and Sennrich, "Root mean square layer normalization" (2019); computed in fp32."""

    def __init__(self, dim: int, eps: float, around_one: bool = False) -> None:
        """``around_one``: the scale is 1 + weight."""
        super().__init__()
        self.eps, self.around_one = eps, around_one
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D) of the same dtype."""
        x32, weight = x.float(), self.weight.float()
        scaled = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * (1.0 + weight if self.around_one else weight)).type_as(x)


def rotary_table(config: ModelConfig, length: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of Su et al., "RoFormer" (2021), fp32 (length, E / 2) each."""
    width = config.head_width
    rates = config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    if config.rope_scaling == "linear":
        rates = rates / config.rope_factor
    elif config.rope_scaling == "llama3":
        # turns of each wave within the original length; between the two limits, interpolate (Llama 3.1, 2024)
        turns = config.rope_original_length * rates / (2 * math.pi)
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        rates = kept * rates + (1.0 - kept) * rates / config.rope_factor
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * rates
    return angles.cos(), angles.sin()


def rotate(x_BHLE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (e, e + E / 2) by its position's angle; the tables are (L, E / 2), or (B, 1, L, E / 2)."""
    first, second = x_BHLE.chunk(2, dim=-1)
    cos, sin = cos.type_as(x_BHLE), sin.type_as(x_BHLE)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def documents(tokens_BL: Tensor, eos_id: int, bos_id: int) -> tuple[Tensor, Tensor]:
    """Return the position of each token in its own document, int64 (B, L), and the attention mask, bool (B, 1, L, L).

    A document begins with ``bos_id`` and ends with ``eos_id``, which may be the same id. The part of a document that was cut
    begins without one; in a row that begins inside a document, positions count from the start of the row.
    """
    index_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    is_eos_BL = tokens_BL == eos_id
    opens_BL = (tokens_BL == bos_id) & F.pad(is_eos_BL[:, :-1], (1, 0), value=True)
    begins_BL = opens_BL | F.pad((is_eos_BL & ~opens_BL)[:, :-1], (1, 0), value=False)
    first_BL = torch.where(begins_BL, index_L, 0).cummax(dim=1).values
    together_BLL = first_BL[:, :, None] == first_BL[:, None, :]
    return index_L - first_BL, (together_BLL & (index_L[:, None] >= index_L)).unsqueeze(1)


class LayerKVCache:
    """Keys and values of the tokens that a block has processed, (B, K, L, E) each."""

    def __init__(self) -> None:
        self._seen: tuple[Tensor, Tensor] | None = None

    def append(self, k_BKLE: Tensor, v_BKLE: Tensor) -> tuple[Tensor, Tensor]:
        """Append these keys and values; return all of them."""
        if self._seen is not None:
            k_BKLE, v_BKLE = torch.cat([self._seen[0], k_BKLE], 2), torch.cat([self._seen[1], v_BKLE], 2)
        self._seen = k_BKLE, v_BKLE
        return self._seen


class KVCache:
    """Cache of the text that a decoder has processed, so that each new token costs the work of one token."""

    def __init__(self, num_layers: int) -> None:
        self.blocks = [LayerKVCache() for _ in range(num_layers)]
        self._ids_BL: Tensor | None = None

    def append(self, tokens_BL: Tensor) -> Tensor:
        """Append these ids; return all of them, (B, L)."""
        self._ids_BL = tokens_BL if self._ids_BL is None else torch.cat([self._ids_BL, tokens_BL], 1)
        return self._ids_BL


def _repeats_heads(q_BHLE: Tensor, mask_B1LL: Tensor | None) -> bool:
    """Return True if key and value heads are repeated for the attention kernel. On CUDA only FlashAttention takes fewer of
    them than query heads; it takes no mask, no fp32, and fp16 only from Ampere on. Where it does not run, torch would fall
    back to full score matrices (B, H, L, L), several per block; its memory-efficient kernel takes repeated heads."""
    return _REPEATS_HEADS[q_BHLE.device.type] and (mask_B1LL is not None or q_BHLE.dtype != torch.bfloat16)


@contextlib.contextmanager
def attention_as_on(device_type: str) -> Iterator[None]:
    """Repeat heads on the CPU as the kernels of another device need it, to predict that device's memory."""
    before = _REPEATS_HEADS["cpu"]
    _REPEATS_HEADS["cpu"] = _REPEATS_HEADS[device_type]
    try:
        yield
    finally:
        _REPEATS_HEADS["cpu"] = before


class Attention(nn.Module):
    """Causal self-attention; K key/value heads serve H query heads (Ainslie et al., "GQA", 2023)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_width = config.num_heads, config.num_kv_heads, config.head_width
        width, kv_width = self.num_heads * self.head_width, self.num_kv_heads * self.head_width
        self.scale = config.attention_scale
        self.query = nn.Linear(config.dim, width, bias=config.qkv_bias)
        self.key = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.value = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.out = nn.Linear(width, config.dim, bias=False)
        self.query_norm, self.key_norm = (
            RMSNorm(self.head_width, config.norm_eps, config.norm_unit_offset) if config.qk_norm else nn.Identity()
            for _ in range(2)
        )

    def forward(
        self, x_BLD: Tensor, cos: Tensor, sin: Tensor, mask_B1LL: Tensor | None = None, kept: LayerKVCache | None = None
    ) -> Tensor:
        """(B, L, D) -> (B, L, D); tables as for ``rotate``; without a mask, attention is causal."""
        B, L, _ = x_BLD.shape
        q_BHLE = self.query_norm(self.query(x_BLD).view(B, L, self.num_heads, self.head_width)).transpose(1, 2)
        k_BKLE = self.key_norm(self.key(x_BLD).view(B, L, self.num_kv_heads, self.head_width)).transpose(1, 2)
        v_BKLE = self.value(x_BLD).view(B, L, self.num_kv_heads, self.head_width).transpose(1, 2)
        q_BHLE, k_BKLE = rotate(q_BHLE, cos, sin), rotate(k_BKLE, cos, sin)
        if kept is not None:
            k_BKLE, v_BKLE = kept.append(k_BKLE, v_BKLE)
        grouped = self.num_heads != self.num_kv_heads
        if grouped and _repeats_heads(q_BHLE, mask_B1LL):
            times, grouped = self.num_heads // self.num_kv_heads, False
            k_BKLE, v_BKLE = k_BKLE.repeat_interleave(times, dim=1), v_BKLE.repeat_interleave(times, dim=1)
        y_BHLE = F.scaled_dot_product_attention(
            q_BHLE,
            k_BKLE,
            v_BKLE,
            attn_mask=mask_B1LL,
            is_causal=mask_B1LL is None,
            scale=self.scale,
            enable_gqa=grouped,
        )
        return self.out(y_BHLE.transpose(1, 2).reshape(B, L, -1))


class FeedForward(nn.Module):
    """SwiGLU or GeGLU (Shazeer, "GLU variants improve transformer", 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        gate_BLF = self.gate(x_BLD)
        gate_BLF = F.silu(gate_BLF) if self.activation == "silu" else F.gelu(gate_BLF, approximate="tanh")
        return self.down(gate_BLF * self.up(x_BLD))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, config.norm_unit_offset)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps, config.norm_unit_offset)
        self.ffn = FeedForward(config)

    def forward(
        self, x_BLD: Tensor, cos: Tensor, sin: Tensor, mask_B1LL: Tensor | None = None, kept: LayerKVCache | None = None
    ) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), cos, sin, mask_B1LL, kept)
        return x_BLD + self.ffn(self.ffn_norm(x_BLD))


class Decoder(nn.Module):
    """Token ids (B, L) -> logits (B, L, V); V is ``vocab_size`` rounded up to a multiple of 64."""

    computes_loss = True
    """Given targets, it computes the loss itself and never holds all logits at once."""

    def __init__(
        self, config: ModelConfig, vocab_size: int, eos_id: int | None = None, bos_id: int | None = None
    ) -> None:
        """``eos_id``: end-of-document id, if documents of one row must not attend to each other; ``bos_id``: the id that
        begins one, None if it is the same."""
        super().__init__()
        self.config, self.vocab_size, self.eos_id = config, vocab_size, eos_id
        self.bos_id = eos_id if bos_id is None else bos_id
        self.padded_vocab_size = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.embedding = nn.Embedding(self.padded_vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps, config.norm_unit_offset)
        self.head = nn.Linear(config.dim, self.padded_vocab_size, bias=False)
        self.tie()
        # computed from the config on the weights' device, so they are not part of a checkpoint
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)

    def forward(
        self,
        tokens_BL: Tensor,
        targets_BL: Tensor | None = None,
        z_weight: float = 0.0,
        past: KVCache | None = None,
        by_token: bool = False,
        largest: LargestLogit | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(B, L) ids -> (B, L, V) logits; or, given ``targets_BL``, the result of ``head_loss``, or ``by_token`` that of
        ``token_nats``, (B, L). The ids follow those in ``past``."""
        x_BLD = self.embedding(tokens_BL)
        if self.config.scaled_embedding:
            x_BLD = x_BLD * math.sqrt(self.config.base_width or self.config.dim)
        cos, sin, mask_B1LL = self._places(tokens_BL, past)
        for block, kept in zip(self.blocks, past.blocks if past else [None] * len(self.blocks), strict=True):
            x_BLD = block(x_BLD, cos, sin, mask_B1LL, kept)
        x_BLD = self.norm(x_BLD)
        if self.config.width_multiplier != 1.0:
            x_BLD = x_BLD / self.config.width_multiplier  # the same as to divide the logits, on fewer numbers
        if targets_BL is None:
            return self.head(x_BLD)
        hidden_ND, wanted_N = x_BLD.flatten(0, 1), targets_BL.flatten()
        if by_token:
            return token_nats(hidden_ND, self.head.weight, wanted_N).view_as(targets_BL)
        return head_loss(hidden_ND, self.head.weight, wanted_N, z_weight, largest)

    def _places(self, tokens_BL: Tensor, past: KVCache | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the rotary tables of the tokens, and the attention mask; None if attention is plainly causal."""
        length = tokens_BL.shape[1]
        if past is None and self.eos_id is None:
            return self.cos[:length], self.sin[:length], None
        ids_BL = tokens_BL if past is None else past.append(tokens_BL)
        no_id = -1
        ends, begins = (no_id if index is None else index for index in (self.eos_id, self.bos_id))
        position_BL, mask_B1LL = documents(ids_BL, ends, begins)
        position_BL, mask_B1LL = position_BL[:, -length:], mask_B1LL[:, :, -length:]
        return self.cos[position_BL].unsqueeze(1), self.sin[position_BL].unsqueeze(1), mask_B1LL

    def tie(self) -> None:
        """Share the embedding's weight with the head, if the config ties them."""
        if self.config.tied_head:
            self.head.weight = self.embedding.weight

    def place(self, device: torch.device) -> None:
        """Move from the meta device to ``device``: only the rotary tables are filled, the weights are uninitialized."""
        # not to_empty: it swaps the contents of fake tensors, which torch refuses while anything refers to one
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        self.tie()
        self.cos, self.sin = rotary_table(self.config, self.config.max_sequence_length, device)


def skeleton(config: ModelConfig, vocab_size: int, eos_id: int | None = None, bos_id: int | None = None) -> Decoder:
    """Return the decoder on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return Decoder(config, vocab_size, eos_id, bos_id)


def build(config: ModelConfig, vocab_size: int, eos_id: int | None = None, bos_id: int | None = None) -> Decoder:
    """Return the decoder with its initial weights, on the CPU."""
    model = skeleton(config, vocab_size, eos_id, bos_id)
    model.place(torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial(config, name, tuple(parameter.shape), 0, parameter.shape[0]))
    return model


def initial(config: ModelConfig, name: str, shape: tuple[int, ...], begin: int, end: int) -> Tensor:
    """Return rows [begin, end) of a parameter's initial value, fp32. It is a function of the config, the name and the row:
    every rank makes its own part, and the whole is the same at any world size.

    Normal; residual outputs are scaled by depth (Radford et al., GPT-2, 2019), matrices of blocks by ``width_multiplier``;
    norms start as identities, biases at zero.
    """
    if len(shape) == 1:
        scale = 0.0 if name.endswith("bias") or config.norm_unit_offset else 1.0
        return torch.full((end - begin,), scale)
    std = _STD / math.sqrt(2 * config.num_layers) if name.endswith(_RESIDUAL) else _STD
    if name.startswith("blocks."):
        std /= math.sqrt(config.width_multiplier)
    first, last = begin // _INIT_ROWS, -(-end // _INIT_ROWS)
    rows = torch.empty((last - first) * _INIT_ROWS, *shape[1:])
    for block in range(first, last):
        key = hashlib.blake2b(f"{config.init_seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        rows[(block - first) * _INIT_ROWS :][:_INIT_ROWS].normal_(0.0, std, generator=generator)
    return rows[begin - first * _INIT_ROWS : end - first * _INIT_ROWS]


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Return the model FLOPs to train on one token, forward and backward.

    6 for each weight that multiplies (the head counts, the embedding's look-up does not) plus the causal half of
    attention's two matmuls, 6 * layers * length * width of all heads (Chowdhery et al., PaLM, 2022, appendix B, halved for
    the mask). The attention of a user's own model is unknown, so it is not counted.
    """
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matmul = sum(p.numel() for p in model.parameters() if p.dim() >= 2 and id(p) not in looked_up)
    if not isinstance(model, Decoder):
        return 6.0 * matmul
    config = model.config
    if config.tied_head:
        matmul += model.head.weight.numel()
    return 6.0 * matmul + 6.0 * config.num_layers * sequence_length * config.num_heads * config.head_width


def hardware_flops_per_token(model: nn.Module, sequence_length: int, recompute: str) -> float:
    """Return the FLOPs that a device does for one token: those of the model, and another forward of the blocks where all of
    a block is recomputed (``recompute`` "full"; what "selective" repeats is small). The masked half of attention and what
    fused kernels repeat internally are not counted (Korthikanti et al., "Reducing activation recomputation", 2022)."""
    flops = flops_per_token(model, sequence_length)
    blocks = getattr(model, "blocks", None)
    if recompute != "full" or blocks is None:
        return flops
    again = 2.0 * sum(p.numel() for p in blocks.parameters() if p.dim() >= 2)
    if isinstance(model, Decoder):
        config = model.config
        again += 2.0 * config.num_layers * sequence_length * config.num_heads * config.head_width
    return flops + again


def num_parameters(model: nn.Module) -> int:
    """Return the number of parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
