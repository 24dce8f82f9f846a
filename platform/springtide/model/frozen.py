"""Storage and matrix products of an adapter's frozen base weights in bf16 or 4 bits (``model.base_precision``).

    bf16   matrices, embedding and head in bf16
    nf4    matrices of blocks in 4 bits, embedding and head in bf16

Vectors stay fp32. A matrix product first converts the whole matrix to the compute dtype. Backward converts it again, so that
autograd keeps only the stored matrix in memory, which is smaller than the converted matrix.

Shape suffixes: as in ``adapter``.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from springtide.errors import look_up


class FrozenLinear(nn.Linear):
    """A linear layer whose weight may be stored in another dtype than that of the input. Such a weight is frozen."""

    def __init__(self, base: nn.Linear) -> None:
        """Make a layer with the shape of ``base`` and uninitialized weights."""
        super().__init__(base.in_features, base.out_features, base.bias is not None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        y = product(x.flatten(0, -2), self.weight, self.in_features).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(x.dtype)


class _Product(torch.autograd.Function):
    """Autograd function of ``product`` for a matrix whose stored dtype differs from the dtype of the input."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, held: Tensor, inputs: int) -> Tensor:
        """Return x W' as ``product`` does. Saves the matrix W for backward in its stored dtype, which may be 4 bits."""
        ctx.save_for_backward(held)
        ctx.inputs = inputs
        return F.linear(x_NI, converted(held, inputs, x_NI.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        """Return the gradient of the input ``x_NI``; the stored matrix is frozen and gets none."""
        (held,) = ctx.saved_tensors
        needed = ctx.needs_input_grad[0]
        return grads[0] @ converted(held, ctx.inputs, grads[0].dtype) if needed else None, None, None


def product(x_NI: Tensor, held: Tensor, inputs: int) -> Tensor:
    """Return x W', (N, O), in the dtype of ``x_NI``. ``held``: W as stored, of any dtype if W is frozen. ``inputs``: number of
    inputs I."""
    return F.linear(x_NI, held) if held.dtype == x_NI.dtype else _Product.apply(x_NI, held, inputs)


def converted(held: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return rows of a matrix, (O, I), in ``dtype``. ``held``: the rows as stored, perhaps packed to 4 bits."""
    return unpack(held, inputs, dtype) if held.dtype == torch.uint8 else held.to(dtype)


def as_held(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a tensor in stored form, the inverse of ``converted``: packed to 4 bits if ``dtype`` is uint8.

    Examples:
        >>> as_held(torch.ones(2, 64), torch.uint8).shape, as_held(torch.ones(2), torch.bfloat16).dtype
        (torch.Size([2, 36]), torch.bfloat16)
    """
    return pack(rows) if dtype == torch.uint8 and rows.dim() == 2 else rows.to(dtype)


def hold(layer: nn.Linear | nn.Embedding, precision: str) -> None:
    """Replace the weight of ``layer`` by an uninitialized frozen weight stored in ``precision``. With nf4, embeddings are
    stored in bf16."""
    (rows, columns), device = layer.weight.shape, layer.weight.device
    packs = look_up({"bf16": False, "nf4": True}, "model.base_precision", precision)
    packed = packs and isinstance(layer, nn.Linear)
    shape, dtype = ((rows, row_bytes(columns)), torch.uint8) if packed else ((rows, columns), torch.bfloat16)
    layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def packed_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return name -> unpacked shape, (O, I), of the weights of ``model`` that are packed to 4 bits."""
    return {
        f"{name}.weight": (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight.dtype == torch.uint8
    }


# NF4: matrices in 4 bits a weight (Dettmers et al., "QLoRA", arXiv 2305.14314, section 3).
#
# row of I weights -> blocks of 64 -> divide by the block's largest magnitude (kept in fp32) -> code of the nearest of
# 16 levels
#
# Levels are quantiles of a normal distribution, because the weights of a matrix are about normally distributed. One
# level is 0. A packed row holds its codes, two per byte with the first in the high half, and then its magnitudes. So
# sharding by rows never splits a block. If 64 divides I, blocks and quantised weights equal those of bitsandbytes.
#
# Shape suffixes: O outputs, I inputs.

BLOCK = 64
"""Number of weights in a block, scaled by one common magnitude."""
_BLOCK_BYTES = BLOCK // 2
_SCALE_BYTES = 4


def _levels() -> list[float]:
    """Return NF4's 16 levels in [-1, 1], ascending: 8 normal quantiles above 0, 7 below and 0 itself, divided by the largest.

    The quantiles are those of evenly spaced probabilities. The highest probability is the mean of 1 - 1/30 and 1 - 1/32. The
    others approach 1/2, but do not reach it.
    """
    last, quantile = 1 - (1 / 30 + 1 / 32) / 2, NormalDist().inv_cdf

    def spaced(count: int) -> list[float]:
        return [quantile(last + (0.5 - last) * place / count) for place in range(count)]

    found = sorted([*spaced(8), 0.0, *(-one for one in spaced(7))])
    return [one / found[-1] for one in found]


LEVELS = torch.tensor(_levels(), dtype=torch.float64).float()
"""Value of each 4-bit code, fp32 (16,)."""
_BOUNDS = torch.tensor([(one + other) / 2 for one, other in pairwise(_levels())])
"""Midpoints between neighbouring levels. A value exactly at a midpoint gets the lower level's code."""
_PAIRS = torch.stack([LEVELS.repeat_interleave(16), LEVELS.repeat(16)], 1).view(torch.int64)[:, 0]
"""Byte -> the two fp32 values of its two codes, viewed as one int64 because one look-up is faster than two; int64 (256,)."""


def row_bytes(inputs: int) -> int:
    """Return the size of a packed row of ``inputs`` weights [bytes].

    Examples:
        >>> row_bytes(64), row_bytes(65), row_bytes(4096) / 4096 * 8
        (36, 72, 4.5)
    """
    return -(-inputs // BLOCK) * (_BLOCK_BYTES + _SCALE_BYTES)


@torch.no_grad()
def pack(rows_OI: Tensor) -> Tensor:
    """Return rows of a matrix in 4 bits, uint8 (O, row_bytes(I)). Each row is packed independently.

    Examples:
        >>> unpack(pack(torch.tensor([[1.0, -1.0, 0.0, 0.5]])), inputs=4)
        tensor([[ 1.0000, -1.0000,  0.0000,  0.4407]])
    """
    rows, inputs = rows_OI.shape
    blocks = -(-inputs // BLOCK)
    found = F.pad(rows_OI.float(), (0, blocks * BLOCK - inputs)).view(rows, blocks, BLOCK)
    scales = found.abs().amax(-1)
    found = found / torch.where(scales > 0, scales, 1.0)[..., None]
    codes = torch.bucketize(found, _BOUNDS.to(found.device), out_int32=True).to(torch.uint8)
    halves = (codes[..., 0::2] << 4) | codes[..., 1::2]
    return torch.cat([halves.flatten(1), scales.contiguous().view(torch.uint8)], 1)


@torch.no_grad()
def unpack(packed: Tensor, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the rows, (O, I), stored in ``packed``. They are computed in fp32, with equal results on every device and for any
    sharding.

    Args:
        packed: uint8 (O, row_bytes(inputs)).
        inputs: number of weights in a row.
        dtype: dtype of the result.
    """
    rows, blocks = len(packed), -(-inputs // BLOCK)
    halves, scales = packed.split([blocks * _BLOCK_BYTES, blocks * _SCALE_BYTES], 1)
    found = (
        _PAIRS.to(packed.device).index_select(0, halves.reshape(-1).int()).view(torch.float32).view(rows, blocks, BLOCK)
    )
    found *= scales.contiguous().view(torch.float32)[..., None]
    return found.view(rows, blocks * BLOCK)[:, :inputs].to(dtype)
