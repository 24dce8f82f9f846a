"""Recomputation of activations in backward, instead of keeping them (Chen et al., "Sublinear memory cost", 2016)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from springtide.errors import look_up

_aten = torch.ops.aten
_DEAR = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    _aten.max.default,  # of all numbers, which the scale of a tensor in fp8 follows from
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}
"""Operators whose results cost more to recompute than to keep. FlexAttention's are kept in compiled blocks; elsewhere its
kernel is compiled by itself, what happens within is not seen here, and its forward is computed again."""


def recomputed(block: nn.Module, how: str) -> nn.Module:
    """Return ``block`` wrapped to keep only its input (``full``), or also the results of matrix products and attention
    (``selective``). RNG state is not restored: blocks draw no random numbers."""
    selective = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep)}
    options = look_up({"full": dict[str, Any](), "selective": selective}, "parallel.recompute", how)
    return checkpoint_wrapper(block, preserve_rng_state=False, **options)


def _keep(_context: Any, operator: Any, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE
