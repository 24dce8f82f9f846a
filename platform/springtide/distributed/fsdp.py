"""Sharding of the model over the device mesh by FSDP2, which implements all strategies below. They differ in the number of
ranks that share one copy of the model, and in how long each rank holds unsharded weights and gradients in memory.

              copies of the model    weights unsharded           gradients unsharded
    ddp       one per rank           always                      until the last micro-batch
    zero1     one                    during a step               until the last micro-batch
    zero2     one                    during a step               during a micro-batch
    zero3     one                    one block, while in use     during the backward of a block
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from springtide.config.engine import ParallelConfig
from springtide.distributed.compiled import compile_block, compiled_loss, flex_kernel
from springtide.distributed.float8 import convert, forget_scales, scale_weights
from springtide.distributed.offload import offload_activations, offload_policy, weights_on
from springtide.distributed.world import World
from springtide.errors import ConfigError, explain, look_up
from springtide.model import Decoder

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_CONFIG = "laid_out_by"


class _Strategy(NamedTuple):
    """How long a sharding strategy keeps whole gradients and whole weights in memory."""

    reduces_each: bool
    """True if gradients are reduced over ranks after each micro-batch, False if only after the last micro-batch of a step."""
    reshards: bool
    """True if unsharded weights are freed after each use, False if they stay until the end of the step."""


_STRATEGIES = {
    "ddp": _Strategy(reduces_each=False, reshards=False),
    "zero1": _Strategy(reduces_each=False, reshards=False),
    "zero2": _Strategy(reduces_each=True, reshards=False),
    "zero3": _Strategy(reduces_each=True, reshards=True),
}


def _strategy(config: ParallelConfig) -> _Strategy:
    return look_up(_STRATEGIES, "parallel.strategy", config.strategy)


def parallelize(model: nn.Module, config: ParallelConfig, world: World, *, as_several: bool = False) -> nn.Module:
    """Shard ``model`` over all ranks, in place. The weights of springtide's own decoder are uninitialized afterwards.

    The order matters. First each block gets fp8 layers, recomputation and compilation. Then each block is sharded, and last the
    root with the rest of the model. Raises ConfigError if the device cannot compute in the configured precision.

    Args:
        model: the model, not sharded, compiled or wrapped yet.
        config: strategy, precision and the other settings of parallelism.
        world: the ranks.
        as_several: True if a single process must shard as a group of ranks does, to load all code that ranks need.
    """
    _strategy(config)  # check the strategy also in a single process, which would ignore it otherwise
    if (
        world.device.type == "cuda"
        and config.computes_in == "bf16"
        and torch.cuda.get_device_capability(world.device) < (8, 0)
    ):
        name = torch.cuda.get_device_name(world.device)
        raise ConfigError(
            explain("parallel.precision", config.precision, f"a {name} has no bf16 arithmetic", "use fp16")
        )
    if isinstance(model, Decoder) and model.eos_id is not None:
        model.attend_by(flex_kernel(model.config, config.computes_in, world.device))
    blocks = getattr(model, "blocks", nn.ModuleList())
    # Avoid FSDP in a single process: there is nothing to shard, and FSDP's copies take a sixth of a small model's step. But
    # FSDP is needed for gradient sums in fp64, for offloading, and for a user's model in a precision below fp32
    offloads = config.offload != "none"  # without FSDP, the offloaded activations would include converted weights
    several = world.size > 1 or as_several
    sharded = several or {config.precision, config.reduction} != {"fp32"} or offloads
    if sharded and not several and config.reduction == "fp32" and isinstance(model, Decoder) and not offloads:
        sharded, model.computes_in = False, _TYPES[config.computes_in]
    if config.float8:
        convert(blocks, config.precision, config.float8, world.device, gathers=sharded)
    for index, block in enumerate(blocks):
        if config.recompute != "none":
            blocks[index] = recomputed(block, config.recompute)
        if config.compile:
            compile_block(blocks[index])
    # compile the loss on GPUs only: on CPUs, losses must be bit-equal to those of uncompiled operations
    if isinstance(model, Decoder) and config.compile and world.device.type == "cuda":
        model.fused_loss = compiled_loss()
    if sharded:
        _shard(model, blocks, config, world)
    if config.offloads_activations:
        offload_activations(model)
    if isinstance(model, Decoder):
        model.place(world.device, weights_on(config, world.device))
    elif not sharded and world.device.type != "cpu":  # a user's own model was built on the CPU: move it
        model.to(world.device)
    return model


def in_precision(model: nn.Module, config: ParallelConfig) -> nn.Module:
    """Convert the weights of ``model``, in place, to the type that a sharded model computes in. Buffers keep their type, as
    they do under FSDP. For a single process that does not train, such as one that generates text."""
    for parameter in model.parameters():
        if parameter.is_floating_point():  # packed integer weights are converted when they are used
            parameter.data = parameter.data.to(_TYPES[config.computes_in])
    return model


def _shard(model: nn.Module, blocks: nn.ModuleList, config: ParallelConfig, world: World) -> None:
    """Shard the blocks and the root of ``model`` over the mesh, in place."""
    policy = MixedPrecisionPolicy(param_dtype=_TYPES[config.computes_in], reduce_dtype=_TYPES[config.reduction])
    reshard, offload = _strategy(config).reshards, offload_policy(config, world.device)
    for block in blocks:
        fully_shard(block, mesh=world.mesh, mp_policy=policy, reshard_after_forward=reshard, offload_policy=offload)
    # keep the root's weights unsharded after forward: backward uses them first, so resharding would only cost another gather
    fully_shard(model, mesh=world.mesh, mp_policy=policy, reshard_after_forward=False, offload_policy=offload)
    setattr(model, _CONFIG, config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gradients are summed, not averaged: the loss is already divided by the tokens of the whole step
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: nn.Module, last: bool) -> None:
    """Prepare the next micro-batch: set whether its backward reduces gradients over ranks and frees unsharded weights.
    ``last``: True for the last micro-batch of the step, whose backward always does both."""
    if isinstance(model, FSDPModule):
        config: ParallelConfig = getattr(model, _CONFIG)
        if config.float8:
            scale_weights(model)
        model.set_requires_gradient_sync(last or reduces_each(model))
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
        # keep gathered weights between micro-batches, because they do not change within a step; only zero3 gathers them again
        # for each use
        model.set_reshard_after_backward(last or _strategy(config).reshards)


def weights_changed(model: nn.Module) -> None:
    """Drop the fp8 scales of the weights at the end of a step, because the next step has other weights."""
    if isinstance(model, FSDPModule) and getattr(model, _CONFIG).float8:
        forget_scales(model)


def reduces_each(model: nn.Module) -> bool:
    """Return True if a sharded model reduces gradients over ranks after each micro-batch, False if it reduces only their sum at
    the end of a step."""
    config: ParallelConfig = getattr(model, _CONFIG)
    # exact (fp64) sums must be accumulated in unsharded gradients, because sharded gradients have the type of the weights
    return _strategy(config).reduces_each and not config.exact


def reshard(model: nn.Module) -> None:
    """Free the unsharded weights now. FSDP gathers them again when they are next needed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Recomputation of activations in backward, instead of keeping them (Chen et al., "Sublinear memory cost", 2016).

_aten = torch.ops.aten
_DEAR = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    _aten.max.default,  # keep the largest absolute value of a tensor: its fp8 scale depends on it
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}
"""Operators whose results are kept for backward, because they cost more to recompute than to keep. FlexAttention's results are
kept only in compiled blocks. In uncompiled blocks its kernel is compiled separately. Then this policy does not see the
operator, and backward recomputes its forward."""


def recomputed(block: nn.Module, how: str) -> nn.Module:
    """Return ``block`` wrapped to keep only its input (``full``), or also the results of matrix products and attention
    (``selective``). RNG state is not restored: blocks draw no random numbers."""
    selective = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep)}
    options = look_up({"full": dict[str, Any](), "selective": selective}, "parallel.recompute", how)
    return checkpoint_wrapper(block, preserve_rng_state=False, **options)


def _keep(_context: Any, operator: Any, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE
