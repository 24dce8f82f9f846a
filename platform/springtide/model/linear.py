"""A linear layer that computes in the type of its input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer whose weights may be wider than its input: they are converted where they are used, and their gradient is
    converted back (mixed precision, Micikevicius et al., 2018). FSDP hands converted weights out, so there nothing is done."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O) of the same dtype."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
