"""Name the tensors of a model and its optimizer, and find the box (offsets and sizes) of each tensor that this rank holds.

Names are ``model/<name of the parameter or buffer>`` and ``optim/<name of the parameter>/<name of the state>``. They are the
same with FSDP2, HSDP or a single device. Hyperparameters are not saved: they come from the config.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from springtide.errors import CheckpointError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts that torch.compile and activation checkpointing insert in parameter names."""


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Return name -> tensor for all tensors of the model and the optimizer; DTensors if the model is sharded. A weight that two
    modules share appears once, under its name in the first module. Raises CheckpointError if optimizer state is not a
    tensor."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without a backward leaves the root's weights unsharded
    # call state_dict before named_parameters, because state_dict also reshards modules whose forward raised an error
    kept = set(model.state_dict(keep_vars=True))
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    found = {f"model/{plain_name(name)}": parameter.detach() for name, parameter in model.named_parameters()}
    found |= {f"model/{plain_name(name)}": buffer for name, buffer in model.named_buffers() if name in kept}
    if optimizer is None:
        return found
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"optim/{names[id(parameter)]}/{key}"
            if isinstance(value, Tensor):
                found[name] = value
            elif value is not None:
                raise CheckpointError(
                    f"{name} is a {type(value).__name__} = {value!r}: only tensors can be saved; store it in a tensor"
                )
    return found


def materialize(optimizer: torch.optim.Optimizer) -> None:
    """Create the state tensors of an optimizer that has not stepped, so that a checkpoint can be loaded into them.

    The optimizer creates them in a step with zero gradients and a learning rate of zero. For plain AdamW they are created
    without a step, because the step takes a sixth of the time of a small restart.
    """
    if optimizer.state:
        return
    if _is_plain_adamw(optimizer) and not _has_hooks(optimizer):
        _materialize_adamw(optimizer)
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


def _is_plain_adamw(optimizer: torch.optim.Optimizer) -> TypeGuard[torch.optim.AdamW]:
    """Return True if the optimizer has the same state as AdamW: torch's class, or a class with ``HAS_STATE_OF_ADAMW``."""
    return type(optimizer) is torch.optim.AdamW or vars(type(optimizer)).get("HAS_STATE_OF_ADAMW", False)


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if step hooks are registered. A hook may create more state: the hook for averaged weights creates the
    averages."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _materialize_adamw(optimizer: torch.optim.AdamW) -> None:
    """Create the same state tensors as AdamW's first step, filled with zeros."""
    for group in optimizer.param_groups:
        on_device = group["capturable"] or group["fused"]
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"] = torch.zeros((), device=parameter.device if on_device else None, dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a distributed tensor; return any other tensor unchanged. Removes torchao's wrapper around
    weights that FSDP gathers in fp8."""
    found: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    numbers: Tensor = (
        getattr(found, found.__tensor_flatten__()[0][0]) if hasattr(found, "fsdp_pre_all_gather") else found
    )
    return numbers


def box(tensor: Tensor) -> Box:
    """Return the box (offsets and sizes in the whole tensor) that this rank holds."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    [chunk] = tensor.__create_chunk_list__()  # torch.distributed.checkpoint calls this method too
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def writes(name: str, tensor: Tensor, rank: int, world_size: int, among: Collection[int] | None = None) -> bool:
    """Return True if this rank writes its box of tensor ``name``. If several ranks hold the same box, exactly one of them
    writes it. The hash of the name chooses this rank, which spreads the load. ``among``: if given, only these ranks may
    write."""
    deal = zlib.crc32(name.encode())
    if not isinstance(tensor, DTensor):
        ranks = range(world_size) if among is None else sorted(among)
        return ranks[deal % len(ranks)] == rank
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None or not box(tensor).num_elements:
        return False
    if among is not None:
        sharded = [placement.is_shard() for placement in tensor.placements]
        same = mesh.mesh[tuple(one if cut else slice(None) for one, cut in zip(place, sharded, strict=True))]
        holders = [one for one in same.flatten().tolist() if one in among]
        return holders[deal % len(holders)] == rank
    return all(
        place[axis] == deal % mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Replicate)
    )


def type_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of ``dtype``. Raises CheckpointError if safetensors has no name for it."""
    if dtype not in _TYPES:
        raise CheckpointError(f"tensors of {dtype} cannot be saved; supported are {', '.join(map(str, _TYPES))}")
    return _TYPES[dtype]


def type_of(name: str) -> torch.dtype:
    """Return the torch dtype whose name in safetensors is ``name``."""
    found: torch.dtype = next(dtype for dtype, known in _TYPES.items() if known == name)
    return found


def raw(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as bytes, uint8 (bytes,). The view shares the tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8)


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile and activation checkpointing insert."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


_TYPES: dict[Any, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
