"""Fully sharded data parallelism (FSDP2) over the mesh's one axis."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from springtide.config.schema import ParallelConfig
from springtide.model import Decoder
from springtide.parallel.mesh import World

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_WHOLE = "weights_stay_whole_in_a_step"


def parallelize(model: Decoder, config: ParallelConfig, world: World) -> Decoder:
    """Lay ``model``, which is on the meta device, over the world, in place; nothing is in its weights yet. The order matters:
    blocks first, then what is left in the root."""
    policy = MixedPrecisionPolicy(param_dtype=_TYPES[config.precision], reduce_dtype=_TYPES[config.reduction])
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    # the root is needed first in backward, right after forward: freeing it would only fetch it again
    fully_shard(model, mesh=world.mesh, mp_policy=policy, reshard_after_forward=False)
    setattr(model, _WHOLE, not config.reshard_after_forward)
    model.place(world.device)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gradients are summed, not averaged: the loss is already divided by the tokens of the whole step
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Reduce gradients in the next backward, or only accumulate them on this rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        model.set_is_last_backward(enabled)
        # between micro-batches the weights do not change: with room for them whole, they are fetched once a step
        model.set_reshard_after_backward(enabled or not getattr(model, _WHOLE, False))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a distributed tensor, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
