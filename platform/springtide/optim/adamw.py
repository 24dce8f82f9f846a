"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019) on a rank's local shards.

torch's AdamW updates DTensors. Before its first step on a device mesh, DTensor derives the placement of every result, weight by
weight. For a small model this takes 0.2 s of CPU time, and again after every change of the number of ranks. The update of a
shard needs no other shard, so this class updates the local shards as plain tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from springtide.checkpoint.tensors import local


class ShardAdamW(torch.optim.AdamW):
    """AdamW whose state is sharded like the parameters. Each rank updates only its own shards."""

    HAS_STATE_OF_ADAMW = True
    """Tells ``checkpoint.tensors`` that this class has the same state as torch's AdamW. It does not count for subclasses, such
    as Muon, whose state differs."""

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        """Collect a parameter group's tensors as local shards: parameters, gradients, moments, and step counts."""
        has_complex = bool(super()._init_group(group, *tensors))
        for some in tensors:
            some[:] = map(local, some)
        return has_complex
