"""The frozen base of an adapter in fewer bits (``model.base_precision``): what is held, and products with it.

    bf16   matrices, embedding and head in bf16
    nf4    matrices of blocks in 4 bits (``nf4``), embedding and head in bf16

Vectors stay fp32. A product converts a whole matrix to the type that it is computed in, and again in backward: autograd keeps
what is held, never the converted matrix.

Shape suffixes: as in ``adapter``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from springtide.errors import look_up
from springtide.model import nf4


class FrozenLinear(nn.Linear):
    """A linear layer whose weight may be held in another type than that of its input; it does not train then."""

    def __init__(self, base: nn.Linear) -> None:
        """Make a layer of the shape of ``base``, with weights that are uninitialized."""
        super().__init__(base.in_features, base.out_features, base.bias is not None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        y = product(x.flatten(0, -2), self.weight, self.in_features).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(x.dtype)


class _Product(torch.autograd.Function):
    """``product`` with a matrix of another type."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, held: Tensor, inputs: int) -> Tensor:
        """Compute what ``product`` returns."""
        ctx.save_for_backward(held)
        ctx.inputs = inputs
        return F.linear(x_NI, converted(held, inputs, x_NI.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        """Return the gradient of the input."""
        (held,) = ctx.saved_tensors
        needed = ctx.needs_input_grad[0]
        return grads[0] @ converted(held, ctx.inputs, grads[0].dtype) if needed else None, None, None


def product(x_NI: Tensor, held: Tensor, inputs: int) -> Tensor:
    """Return x W', (N, O), in the type of ``x_NI``. ``held``: the matrix, in any type if it is frozen; ``inputs``: I."""
    return F.linear(x_NI, held) if held.dtype == x_NI.dtype else _Product.apply(x_NI, held, inputs)


def converted(held: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return rows of a matrix (O, I) as ``dtype``, from what is held of them."""
    return nf4.unpack(held, inputs, dtype) if held.dtype == torch.uint8 else held.to(dtype)


def as_held(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a tensor as they are held, the inverse of ``converted``: packed if ``dtype`` is uint8.

    Examples:
        >>> as_held(torch.ones(2, 64), torch.uint8).shape, as_held(torch.ones(2), torch.bfloat16).dtype
        (torch.Size([2, 36]), torch.bfloat16)
    """
    return nf4.pack(rows) if dtype == torch.uint8 and rows.dim() == 2 else rows.to(dtype)


def hold(layer: nn.Linear | nn.Embedding, precision: str) -> None:
    """Hold the weight of ``layer`` as ``precision`` from now on, uninitialized and frozen; 4 bits are for linear layers."""
    (rows, columns), device = layer.weight.shape, layer.weight.device
    packs = look_up({"bf16": False, "nf4": True}, "model.base_precision", precision)
    packed = packs and isinstance(layer, nn.Linear)
    shape, dtype = ((rows, nf4.row_bytes(columns)), torch.uint8) if packed else ((rows, columns), torch.bfloat16)
    layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def packed_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the names of the weights that are packed, and the shape of each matrix, (O, I)."""
    return {
        f"{name}.weight": (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight.dtype == torch.uint8
    }
