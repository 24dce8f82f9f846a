"""Offloading of a step's tensors from device memory to host memory (``parallel.offload``).

    parameters    shards of weights, gradients and optimizer state, by FSDP2; the update is computed on the host
    activations   inputs of recomputed blocks: copied to pinned host memory in forward, and back in backward

Copies run in the compute stream. So the device waits for the copies, but the host does not. Checkpoints do not depend on
offloading.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from springtide.config.engine import ParallelConfig

_as_if: ContextVar[bool] = ContextVar("as_if", default=False)


@contextlib.contextmanager
def as_if_offloaded() -> Iterator[None]:
    """In the body of the ``with`` statement, drop activations instead of offloading them. Backward gets uninitialized numbers
    in their place. For a test step on fake tensors, which have no memory to copy to the host."""
    before = _as_if.set(True)
    try:
        yield
    finally:
        _as_if.reset(before)


def weights_on(config: ParallelConfig, device: torch.device) -> torch.device:
    """Return the device on which a rank that computes on ``device`` stores and updates its weights."""
    return torch.device("cpu") if config.offloads_parameters else device


def offload_policy(config: ParallelConfig, device: torch.device) -> OffloadPolicy:
    """Return FSDP2's policy for shards of a model that computes on ``device``."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.offloads_parameters else OffloadPolicy()


def offload_activations(model: nn.Module) -> None:
    """Make ``model`` keep the tensors that forward saves for backward on the host, except weights and tensors without
    gradient."""
    entered: list[saved_tensors_hooks] = []

    def enter(*_: Any) -> None:
        entered.append(saved_tensors_hooks(_pack, _unpack))
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__()

    # set the hooks on the whole model: hooks of a compiled block would be compiled into its graph
    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    base = tensor if tensor._base is None else tensor._base
    # keep weights on the device, and tensors such as masks and rotary tables, which all blocks share
    if isinstance(base, nn.Parameter) or not tensor.requires_grad:
        return tensor
    if _as_if.get():
        return tensor.device, tensor.to("meta")
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, kept.copy_(tensor.detach(), non_blocking=True)


def _unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, kept = packed
    return torch.empty_like(kept, device=device) if kept.device.type == "meta" else kept.to(device, non_blocking=True)
