"""Attention within documents by FlexAttention (Dong et al., arXiv 2412.05496), a kernel that never computes the scores between
documents. On CPUs, and wherever the kernel does not run, attention uses a dense L x L mask (``positions.documents``).

A query attends to one interval of keys, [lowest, query]. ``lowest`` is the start of the query's document or of its window,
whichever is later. ``lowest`` never decreases along a row. So the values of ``lowest`` at the first and last of 128 queries
determine which 128 x 128 blocks of scores are needed. No tensor of size L x L is made, no shape depends on the documents, and
the CPU never waits for the device.

Shape suffixes: as in ``decoder``; Q blocks of queries, S blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Number of queries, and number of keys, in one block of scores: 128, FlexAttention's default."""

FlexKernel = Callable[..., Tensor]
"""Compiled ``torch.nn.attention.flex_attention.flex_attention``. Uncompiled, the function would compute all scores."""


def lowest_keys(first_BL: Tensor, window: int = 0) -> Tensor:
    """Return the index of the first key that each query attends to, int64 (B, L).

    Args:
        first_BL: index at which each token's document begins, int64, as from ``positions.document_firsts``.
        window: number of tokens that a token attends to; 0: no window [tokens].
    """
    if not window:
        return first_BL
    index_L = torch.arange(first_BL.shape[1], device=first_BL.device)
    return torch.maximum(first_BL, index_L - window + 1)


def block_mask(lowest_BL: Tensor) -> BlockMask:
    """Return FlexAttention's mask in which each query attends to the keys from ``lowest_BL`` to its own position. The mask
    lists which blocks of scores are needed in part, and which in full.

    Args:
        lowest_BL: as from ``lowest_keys``; it must not decrease along a row.
    """
    L = lowest_BL.shape[1]
    number_S = torch.arange(-(-L // BLOCK), device=lowest_BL.device)
    begins_Q = number_S * BLOCK
    ends_Q = (begins_Q + BLOCK - 1).clamp_max(L - 1)
    least_BQ1, most_BQ1 = lowest_BL[:, begins_Q, None], lowest_BL[:, ends_Q, None]
    number_Q1 = number_S[:, None]
    seen_BQS = (number_S <= number_Q1) & (begins_Q + BLOCK > least_BQ1)
    # the last block may reach beyond L: treat it as partial, so that positions beyond L are masked
    is_whole_Q1 = (begins_Q + BLOCK <= L)[:, None]
    full_BQS = (number_S < number_Q1) & (begins_Q >= most_BQ1) & is_whole_Q1

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= lowest_BL[row, query])

    part, full = _ordered(seen_BQS & ~full_BQS), _ordered(full_BQS)
    return BlockMask.from_kv_blocks(*part, *full, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(L, L))


def _ordered(wanted_BQS: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each query block needs, int32 (B, 1, Q). Also return, for each query block, the indices of all
    key blocks, with the needed blocks first, int32 (B, 1, Q, S)."""
    count_BQ = wanted_BQS.sum(-1, dtype=torch.int32)
    index_BQS = wanted_BQS.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count_BQ[:, None].contiguous(), index_BQS[:, None].contiguous()


def attend(
    kernel: FlexKernel, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, mask: BlockMask, scale: float | None, cap: float
) -> Tensor:
    """Return the attention output, (B, H, L, E).

    Args:
        kernel: compiled FlexAttention.
        q_BHLE: queries.
        k_BKLE: keys.
        v_BKLE: values, with as many heads as the keys.
        mask: from ``block_mask``.
        scale: factor of the scores; None: 1 / sqrt(E).
        cap: soft cap of the scores, as ``model.attention_cap``; 0: none.
    """
    named: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": q_BHLE.shape[1] != k_BKLE.shape[1]}
    if cap:

        def score(value: Tensor, _row: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
            return cap * torch.tanh(value / cap)

        named["score_mod"] = score
    return kernel(q_BHLE, k_BKLE, v_BKLE, **named)


def same_memory(q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, **named: Any) -> Tensor:
    """Stand-in for the FlexAttention kernel to predict memory: causal attention that saves as much for backward as the
    kernel."""
    grouped = bool(named["enable_gqa"])
    return F.scaled_dot_product_attention(q_BHLE, k_BKLE, v_BKLE, is_causal=True, enable_gqa=grouped)
