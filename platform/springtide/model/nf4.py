"""NF4: matrices in 4 bits a weight (Dettmers et al., "QLoRA", arXiv 2305.14314, section 3).

    a row of I weights -> blocks of 64 -> of each its largest magnitude, fp32 -> weights over it, each as the nearest of 16
    levels

Levels are quantiles of a normal distribution, because weights of a matrix are about normal; 0 is one of them. A packed row
holds its codes, two to a byte, the first in the high half, and then its magnitudes: rows are cut between ranks, blocks never
are. Where 64 divides I, blocks are those of bitsandbytes, and so are the weights.

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Weights that share a magnitude."""
_BLOCK_BYTES = BLOCK // 2
_SCALE_BYTES = 4


def _levels() -> list[float]:
    """Return the 16 levels in [-1, 1], ascending: 8 quantiles above 0 and 7 below, between 1/2 and the mean of 1 - 1/30 and
    1 - 1/32, over the largest."""
    last, quantile = 1 - (1 / 30 + 1 / 32) / 2, NormalDist().inv_cdf

    def spaced(count: int) -> list[float]:
        return [quantile(last + (0.5 - last) * place / count) for place in range(count)]

    found = sorted([*spaced(8), 0.0, *(-one for one in spaced(7))])
    return [one / found[-1] for one in found]


LEVELS = torch.tensor(_levels(), dtype=torch.float64).float()
"""Value of each code, fp32 (16,)."""
_BOUNDS = torch.tensor([(one + other) / 2 for one, other in pairwise(_levels())])
"""Between two levels: what lies below has the lower code."""
_PAIRS = torch.stack([LEVELS.repeat_interleave(16), LEVELS.repeat(16)], 1).view(torch.int64)[:, 0]
"""The two values of each byte, seen as one number, which is looked up faster; (256,)."""


def row_bytes(inputs: int) -> int:
    """Return the size of a packed row of ``inputs`` weights [bytes].

    Examples:
        >>> row_bytes(64), row_bytes(65), row_bytes(4096) / 4096 * 8
        (36, 72, 4.5)
    """
    return -(-inputs // BLOCK) * (_BLOCK_BYTES + _SCALE_BYTES)


@torch.no_grad()
def pack(rows_OI: Tensor) -> Tensor:
    """Return rows of a matrix in 4 bits, uint8 (O, row_bytes(I)). Each row is packed by itself.

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
    """Return the rows (O, I) that ``packed`` holds; computed in fp32, the same on every device and for any cut of the rows.

    Args:
        packed: uint8 (O, row_bytes(inputs)).
        inputs: weights of a row.
        dtype: of what is returned.
    """
    rows, blocks = len(packed), -(-inputs // BLOCK)
    halves, scales = packed.split([blocks * _BLOCK_BYTES, blocks * _SCALE_BYTES], 1)
    found = (
        _PAIRS.to(packed.device).index_select(0, halves.reshape(-1).int()).view(torch.float32).view(rows, blocks, BLOCK)
    )
    found *= scales.contiguous().view(torch.float32)[..., None]
    return found.view(rows, blocks * BLOCK)[:, :inputs].to(dtype)
