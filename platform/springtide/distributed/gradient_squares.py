"""The squared norm of what each rank adds to the gradients, which sharding never leaves in memory: seen in the buffer that is
reduced. Nothing is computed twice, and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class GradientSquares:
    """Reduce-scatter of a sharded model that adds up the squares of the gradients it is given: FSDP allocates its input, fills
    it, allocates its output, and calls it where a copy of the model has several shards."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._input: Tensor | None = None

    def take(self) -> Tensor:
        """Return the sum since it was last taken, a float64 scalar; after backward."""
        found, self._sum = self._sum, torch.zeros_like(self._sum)
        return found

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an input, or for its output: then the input is complete."""
        if self._input is None:
            self._input = torch.empty(math.prod(size), dtype=dtype, device=device)
            return self._input
        whole, self._input = self._input, None
        self._sum += torch.linalg.vector_norm(whole, dtype=torch.float64).square()
        return torch.empty(math.prod(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce and scatter."""
        work: dist.Work | None = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        return work


def watch_gradients(model: nn.Module, device: torch.device) -> GradientSquares | None:
    """Return what sees the gradients that ``model`` reduces from now on; None if it is not sharded."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        return None
    found = GradientSquares(device)
    for module in sharded:
        module.set_custom_reduce_scatter(cast(Any, found))  # torch keeps the type of its argument to itself
    return found
