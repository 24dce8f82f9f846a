"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019) on a rank's local shards.

torch's AdamW works on DTensors. Before its first step on a device mesh, DTensor derives the placement of each result, weight by
weight. For a small model this takes 0.2 s of a core, again after each change of the number of ranks. An update of a shard needs
no other shard, so this class updates plain local shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from springtide.checkpoint.tensors import local


class ShardAdamW(torch.optim.AdamW):
    """AdamW whose state is sharded like the parameters, and whose step computes with this rank's shards."""

    HAS_STATE_OF_ADAMW = True
    """``checkpoint.tensors`` creates the state of this class as for torch's AdamW. Subclasses do not inherit this."""

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        """Collect a parameter group's tensors as local shards: parameters, gradients, moments, and step counts."""
        has_complex = bool(super()._init_group(group, *tensors))
        for some in tensors:
            some[:] = map(local, some)
        return has_complex
