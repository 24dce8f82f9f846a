"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019) over the shards that a rank holds.

torch's AdamW works on DTensors. Before its first step on a mesh it derives the placement of each result, weight by weight. This
takes a fifth of a second of a core for a small model, after each change of the ranks. An update of a shard needs no other
shard, so this class works on plain local shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from springtide.checkpoint.tensors import local


class ShardAdamW(torch.optim.AdamW):
    """AdamW whose state is sharded like the parameters, and whose step computes with this rank's shards."""

    HAS_STATE_OF_ADAMW = True
    """Read by ``checkpoint.tensors.materialize``: the state is plain AdamW's. It does not count for subclasses."""

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        """Collect a parameter group's tensors as local shards: parameters, gradients, moments, and step counts."""
        has_complex = bool(super()._init_group(group, *tensors))
        for some in tensors:
            some[:] = map(local, some)
        return has_complex
