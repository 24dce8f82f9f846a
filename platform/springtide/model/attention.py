"""Attention, its norm and its cache of keys and values.

Shape suffixes: as in ``decoder``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from springtide.config.engine import ModelConfig
from springtide.model.flex import BlockMask, FlexKernel, attend
from springtide.model.positions import rotate

_REPEATS_HEADS = {"cpu": False, "cuda": True}
"""Device type -> True if key/value heads must be repeated, one for each query head, because the attention kernel does not
support grouped-query attention."""
_QUERIES_AT_ONCE = 1024
"""A layer with a window computes the scores of at least this many queries at a time. A smaller number would skip more masked
scores, but split the work into more and smaller matrix products."""


class RMSNorm(nn.Module):
    """RMS normalization (Zhang and Sennrich, "Root mean square layer normalization", 2019), computed in fp32."""

    def __init__(self, dim: int, eps: float, around_one: bool = False) -> None:
        """``around_one``: True if outputs are multiplied by 1 + weight instead of by weight."""
        super().__init__()
        self.eps, self.around_one = eps, around_one
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D) of the same dtype."""
        if self.around_one:  # add in fp32: in bf16 or fp16, 1 + weight would lose digits of a small weight
            return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(x)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class LayerKVCache:
    """Cached keys and values of one block, (B, K, L, E) each. Tokens that no later token attends to are dropped."""

    def __init__(self) -> None:
        self._seen: tuple[Tensor, Tensor] | None = None

    def append(self, k_BKLE: Tensor, v_BKLE: Tensor, window: int = 0) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens; return the keys and values of all cached and new tokens. With a ``window`` (0:
        none) the cache keeps only tokens that the next token attends to."""
        if self._seen is not None:
            k_BKLE, v_BKLE = torch.cat([self._seen[0], k_BKLE], 2), torch.cat([self._seen[1], v_BKLE], 2)
        oldest = max(0, k_BKLE.shape[2] - window + 1) if window else 0
        self._seen = k_BKLE[:, :, oldest:], v_BKLE[:, :, oldest:]
        return k_BKLE, v_BKLE

    def keep(self, rows_N: Tensor) -> None:
        """Drop all batch rows except those with the indices ``rows_N``, int64 (N,)."""
        if self._seen is not None:
            self._seen = self._seen[0][rows_N], self._seen[1][rows_N]


class KVCache:
    """Keys, values and token ids of the text that a decoder has processed, so that a step processes only the new tokens."""

    def __init__(self, num_layers: int, padding_B: Tensor | None = None) -> None:
        """``padding_B``: number of padding tokens at the start of each row, int64 (B,); None: no padding."""
        self.blocks = [LayerKVCache() for _ in range(num_layers)]
        self.padding_B = padding_B
        self._ids_BL: Tensor | None = None

    def append(self, tokens_BL: Tensor) -> Tensor:
        """Append the ids of new tokens; return the ids of the whole text, (B, L)."""
        self._ids_BL = tokens_BL if self._ids_BL is None else torch.cat([self._ids_BL, tokens_BL], 1)
        return self._ids_BL

    def keep(self, rows_N: Tensor) -> None:
        """Drop all batch rows except those with the indices ``rows_N``, int64 (N,)."""
        self._ids_BL = None if self._ids_BL is None else self._ids_BL[rows_N]
        self.padding_B = None if self.padding_B is None else self.padding_B[rows_N]
        for block in self.blocks:
            block.keep(rows_N)


def _repeats_heads(q_BHLE: Tensor, mask_B1LL: Tensor | None) -> bool:
    """Return True if key and value heads must be repeated for the attention kernel. On CUDA, only FlashAttention supports fewer
    key/value heads than query heads. But FlashAttention supports neither masks nor fp32, and fp16 only on Ampere or newer GPUs.
    Without it, torch would allocate several score matrices (B, H, L, L) per block. The memory-efficient kernel allocates none,
    but needs repeated heads."""
    return _REPEATS_HEADS[q_BHLE.device.type] and (mask_B1LL is not None or q_BHLE.dtype != torch.bfloat16)


@contextlib.contextmanager
def attention_as_on(device_type: str) -> Iterator[None]:
    """In the ``with`` body, repeat key/value heads on the CPU where ``device_type`` would repeat them. Used to predict the
    memory of a step on such a device."""
    before = _REPEATS_HEADS["cpu"]
    _REPEATS_HEADS["cpu"] = _REPEATS_HEADS[device_type]
    try:
        yield
    finally:
        _REPEATS_HEADS["cpu"] = before


class Attention(nn.Module):
    """Causal self-attention; K key/value heads serve H query heads (Ainslie et al., "GQA", 2023). In a local layer (with
    a window) a token attends to the ``window`` newest tokens only, itself included (Beltagy et al., "Longformer", 2020)."""

    def __init__(self, config: ModelConfig, window: int = 0) -> None:
        """``window``: number of tokens that a token attends to; 0: all, a global layer [tokens]."""
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_width = config.num_heads, config.num_kv_heads, config.head_width
        width, kv_width = self.num_heads * self.head_width, self.num_kv_heads * self.head_width
        self.scale, self.cap, self.window = config.attention_scale, config.attention_cap, window
        self.norm_of = config.qk_norm
        self.flex: FlexKernel | None = None
        """Compiled FlexAttention, for masks from ``flex.block_mask``; None where FlexAttention does not run."""
        self.query = Linear(config.dim, width, bias=config.qkv_bias)
        self.key = Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.value = Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.out = Linear(width, config.dim, bias=False)
        widths = {"none": (0, 0), "head": (self.head_width, self.head_width), "all_heads": (width, kv_width)}
        self.query_norm, self.key_norm = (
            RMSNorm(one, config.norm_eps, config.norm_unit_offset) if one else nn.Identity()
            for one in widths[config.qk_norm]
        )

    def forward(
        self,
        x_BLD: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | BlockMask | None = None,
        kept: LayerKVCache | None = None,
    ) -> Tensor:
        """(B, L, D) -> (B, L, D). ``cos``, ``sin``: tables as for ``rotate``. ``mask``: bool (B, 1, L, L), or a block mask from
        ``flex.block_mask``, which includes the window; None means a causal mask only. ``kept``: the block's cache of keys and
        values."""
        B, L, _ = x_BLD.shape
        q_BLF, k_BLF = self.query(x_BLD), self.key(x_BLD)
        if self.norm_of == "all_heads":
            q_BLF, k_BLF = self.query_norm(q_BLF), self.key_norm(k_BLF)
        q_BLHE, k_BLKE = (
            q_BLF.view(B, L, self.num_heads, self.head_width),
            k_BLF.view(B, L, self.num_kv_heads, self.head_width),
        )
        if self.norm_of == "head":
            q_BLHE, k_BLKE = self.query_norm(q_BLHE), self.key_norm(k_BLKE)
        v_BKLE = self.value(x_BLD).view(B, L, self.num_kv_heads, self.head_width).transpose(1, 2)
        q_BHLE, k_BKLE = rotate(q_BLHE.transpose(1, 2), cos, sin), rotate(k_BLKE.transpose(1, 2), cos, sin)
        if kept is not None:
            k_BKLE, v_BKLE = kept.append(k_BKLE, v_BKLE, self.window)
        if isinstance(mask, BlockMask):
            assert self.flex is not None
            y_BHLE = attend(self.flex, q_BHLE, k_BKLE, v_BKLE, mask, self.scale, self.cap)
        else:
            if mask is not None and mask.shape[-1] != k_BKLE.shape[2]:
                # cut the mask to the cached keys: a layer with a window caches only the newest tokens
                mask = mask[..., -k_BKLE.shape[2] :]
            y_BHLE = self._attend(q_BHLE, k_BKLE, v_BKLE, mask)
        return self.out(y_BHLE.transpose(1, 2).reshape(B, L, -1))

    def _attend(self, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, mask_B1LL: Tensor | None) -> Tensor:
        """Return the attention output of the queries, which belong to the newest tokens. If there are more keys than the
        window's size, compute a group of queries at a time, and skip the keys to which no query of the group attends."""
        num_queries, num_keys = q_BHLE.shape[2], k_BKLE.shape[2]
        if not self.window or num_keys <= self.window:
            return self._product(q_BHLE, k_BKLE, v_BKLE, mask_B1LL)
        at_once, before, found = max(self.window, _QUERIES_AT_ONCE), num_keys - num_queries, []
        for begin in range(0, num_queries, at_once):
            end = min(begin + at_once, num_queries)
            queries = torch.arange(before + begin, before + end, device=q_BHLE.device)
            first, last = max(0, before + begin - self.window + 1), before + end
            distance = queries[:, None] - torch.arange(first, last, device=q_BHLE.device)
            near_LL = (distance >= 0) & (distance < self.window)
            if mask_B1LL is not None:
                near_LL = near_LL & mask_B1LL[:, :, begin:end, first:last]
            keys = slice(first, last)
            found.append(self._product(q_BHLE[:, :, begin:end], k_BKLE[:, :, keys], v_BKLE[:, :, keys], near_LL))
        return torch.cat(found, dim=2)

    def _product(self, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, mask_B1LL: Tensor | None) -> Tensor:
        grouped = self.num_heads != self.num_kv_heads
        if grouped and (self.cap or _repeats_heads(q_BHLE, mask_B1LL)):
            times, grouped = self.num_heads // self.num_kv_heads, False
            k_BKLE, v_BKLE = k_BKLE.repeat_interleave(times, dim=1), v_BKLE.repeat_interleave(times, dim=1)
        if self.cap:
            return self._capped(q_BHLE, k_BKLE, v_BKLE, mask_B1LL)
        return F.scaled_dot_product_attention(
            q_BHLE,
            k_BKLE,
            v_BKLE,
            attn_mask=mask_B1LL,
            is_causal=mask_B1LL is None,
            scale=self.scale,
            enable_gqa=grouped,
        )

    def _capped(self, q_BHLE: Tensor, k_BHLE: Tensor, v_BHLE: Tensor, mask_B1LL: Tensor | None) -> Tensor:
        """Return the output of attention with scores cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118, section 2)."""
        scale = self.head_width**-0.5 if self.scale is None else self.scale
        scores_BHLL = self.cap * torch.tanh(q_BHLE @ k_BHLE.transpose(-1, -2) * (scale / self.cap))
        if mask_B1LL is None:
            length = q_BHLE.shape[2]
            mask_B1LL = torch.ones(length, length, dtype=torch.bool, device=q_BHLE.device).tril()
        scores_BHLL = scores_BHLL.masked_fill(~mask_B1LL, -math.inf)
        return scores_BHLL.softmax(-1, dtype=torch.float32).type_as(v_BHLE) @ v_BHLE


# A linear layer that computes in the dtype of its input.


class Linear(nn.Linear):
    """A linear layer whose weights may have a wider dtype than its input. The weights are converted at each use, and their
    gradient is converted back (mixed precision, Micikevicius et al., 2018). Under FSDP the weights arrive already converted."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O) of the same dtype."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
