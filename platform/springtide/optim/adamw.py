"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019) over the shards that a rank holds.

torch's own takes distributed tensors, and before the first step of each mesh it works out, weight by weight, where the results
lie: a fifth of a second of a core for a small model, after each change of the ranks. An update of a shard needs no other shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from springtide.checkpoint.tensors import local


class ShardAdamW(torch.optim.AdamW):
    """AdamW whose state is laid out as the parameters are, and whose step computes with this rank's shards."""

    HAS_STATE_OF_ADAMW = True
    """For ``checkpoint.tensors.materialize``; not of classes below this one."""

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        """Collect the tensors of a parameter group: parameters, gradients, moments, and numbers of steps."""
        has_complex = bool(super()._init_group(group, *tensors))
        for some in tensors:
            some[:] = map(local, some)
        return has_complex
