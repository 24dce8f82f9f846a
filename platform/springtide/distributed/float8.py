"""Matrix products of the blocks in fp8, by torchao: each matrix is scaled to the range of fp8, and the product is scaled back.

    fp8           one scale per tensor; weights are converted before they are gathered: a quarter of the bytes of fp32
    fp8_rowwise   one scale per row or column; weights are gathered in bf16

Scales are computed from the current values (dynamic scaling), without a history of earlier steps. So checkpoints are the same
as in any other precision. Embedding, head, norms and attention stay in bf16. This is the only file that uses torchao.

Micikevicius et al., "FP8 formats for deep learning" (2022).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from springtide.errors import ConfigError, explain
from springtide.model.frozen import FrozenLinear

WHEEL = "torchao>=0.18,<0.19"
"""Tested versions of torchao, equal to those of springtide's extra ``fp8``."""
_MULTIPLE = 16
"""The fp8 kernels need matrix sides that are multiples of this number. A layer with any other side stays in bf16."""
_LEAST_CAPABILITY = (8, 9)
"""Least CUDA compute capability with fp8 arithmetic, that of Ada GPUs. Hopper has 9.0."""
_FIELD = "parallel.precision"
_emulated: ContextVar[bool] = ContextVar("emulated", default=False)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """In the body of the ``with`` statement, make ``convert`` emulate fp8, so that any device can run the model: numbers are
    rounded to fp8 and multiplied in fp32. For tests; emulation is slower than bf16."""
    before = _emulated.set(True)
    try:
        yield
    finally:
        _emulated.reset(before)


def check_installed(precision: str) -> None:
    """Raise ConfigError if torchao is missing or its version is not a tested one.

    Args:
        precision: value of ``parallel.precision``, for the message.
    """
    remedy = f"pip install 'springtide[fp8]', which is {WHEEL}, or use bf16"
    try:
        found = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(explain(_FIELD, precision, "needs torchao, which is not installed", remedy)) from None
    if not found.startswith("0.18."):
        raise ConfigError(explain(_FIELD, precision, f"was tested with {WHEEL}, but {found} is installed", remedy))


def converts(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True if a layer is converted to fp8: it is linear, not the frozen base of an adapter, and the kernels support its
    sides.

    Args:
        layer: a layer of a block.

    Examples:
        >>> converts(nn.Linear(32, 48)), converts(nn.Linear(32, 40)), converts(nn.Embedding(32, 48))
        (True, False, False)
    """
    if not isinstance(layer, nn.Linear) or isinstance(layer, FrozenLinear):
        return False
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def convert(blocks: nn.ModuleList, precision: str, recipe: str, device: torch.device, gathers: bool) -> None:
    """Replace in place the linear layers of ``blocks`` for which ``converts`` is True by fp8 layers. Their weights and names
    stay the same.

    Args:
        blocks: blocks that are not sharded, compiled or wrapped yet.
        precision: value of ``parallel.precision``, for messages.
        recipe: tensorwise or rowwise.
        device: the device that computes.
        gathers: True if the blocks will be sharded. With the recipe tensorwise, weights are then gathered in fp8.

    Raises:
        ConfigError: torchao is missing, the device has no fp8 arithmetic, or no layer has supported sides.
    """
    check_installed(precision)
    if not any(converts(layer) for layer in blocks.modules()):
        what = f"finds no linear layer in the blocks whose sides are multiples of {_MULTIPLE}"
        raise ConfigError(explain(_FIELD, precision, what, "change model.dim and ffn_dim, or use bf16"))
    if not _emulated.get():
        _check_device(device, precision)
    import torchao.float8 as ao

    by_tensor = recipe == "tensorwise"
    changes = {"emulate": _emulated.get(), "enable_fsdp_float8_all_gather": gathers and by_tensor}
    found = dataclasses.replace(ao.Float8LinearConfig.from_recipe_name(recipe), **changes)
    ao.convert_to_float8_training(blocks, config=found, module_filter_fn=lambda layer, name: converts(layer))
    if gathers and by_tensor:
        padded = _padded_weight()
        for layer in filter(converts, blocks.modules()):
            layer.weight = nn.Parameter(padded.of(layer.weight), layer.weight.requires_grad)
    if gathers or by_tensor:
        return
    rounding = _rounding_layer()
    for name, layer in list(blocks.named_modules()):
        if isinstance(layer, rounding.__base__):
            parent, _, last = name.rpartition(".")
            setattr(blocks.get_submodule(parent), last, rounding.from_float(layer, config=found))


def _check_device(device: torch.device, precision: str) -> None:
    if device.type != "cuda":
        what, remedy = f"a {device.type} has no arithmetic of 8 bits", "use bf16, or train on GPUs"
    elif torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        what = f"a {torch.cuda.get_device_name(device)} has no arithmetic of 8 bits"
        remedy = "use bf16, or an L4, L40S, H100 or newer"
    else:
        return
    raise ConfigError(explain(_FIELD, precision, what, remedy))


@functools.cache
def _rounding_layer() -> Any:
    """Return a subclass of torchao's layer that first rounds its weights to the type of its input. FSDP gathers rounded
    weights. So with this layer a single process without FSDP computes the same results as a sharded group."""
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    class RoundingLinear(Float8Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight.to(x.dtype)
            y: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), self.linear_mm_config, self.config)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    return RoundingLinear


@functools.cache
def _padded_weight() -> Any:
    """Return a subclass of torchao's fp8-gathered weight that works with any number of shards. FSDP gathers only shards of
    equal size. So a shard with fewer rows is padded with zeros, which do not change its fp8 scale. The zeros are cut off the
    gathered weight."""
    from torch.utils._pytree import tree_map_only
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Weight

    class PaddedWeight(Weight):
        @classmethod
        def of(cls, weight: Any, tensor: Tensor | None = None) -> Any:
            tensor = weight._tensor if tensor is None else tensor
            return cls(tensor, weight._linear_mm_config, weight._dtype, weight._precomputed_scale)

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            return tree_map_only(Weight, cls.of, super().__torch_dispatch__(func, types, args, kwargs))

        def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
            missing = -(-size[0] // mesh.size()) - len(self._tensor)
            whole = self.of(self, nn.functional.pad(self._tensor, (0, 0, 0, missing))) if missing else self
            data, (scale,) = Weight.fsdp_pre_all_gather(whole, mesh)
            return data, (scale, size[0])

        def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
            scale, rows = metadata
            found = super().fsdp_post_all_gather((gathered[0][:rows],), (scale,), dtype, out=out)
            return found if found is None else (found[0], gathered)

    return PaddedWeight


def scale_weights(model: nn.Module) -> None:
    """Compute the fp8 scales of all weights that are gathered in fp8, in one all-reduce instead of one per weight. Does nothing
    if the scales are already known. After a change of the weights, call ``forget_scales`` first.

    Args:
        model: the sharded model.
    """
    found = _gathered_in_fp8(model)
    # Precompute scales only if every shard keeps its scale. A rank without a scale computes it in a collective: if only some
    # ranks did so, they would hang. Two kinds of shards lose their scale in a copy: shards on the host, when they move to the
    # device, and shards that FSDP pads, in its first forward
    if found and found[0]._local_tensor._precomputed_scale is None and all(map(_keeps_its_shard, found)):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)


def _keeps_its_shard(weight: DTensor) -> bool:
    mesh = weight.device_mesh
    shards = math.prod(mesh.size(of) for of, placement in enumerate(weight.placements) if placement.is_shard())
    return weight.device.type == mesh.device_type and weight.shape[0] % shards == 0


def forget_scales(model: nn.Module) -> None:
    """Drop the fp8 scales that ``scale_weights`` computed, because the weights have changed.

    Args:
        model: the sharded model.
    """
    for weight in _gathered_in_fp8(model):
        weight._local_tensor._precomputed_scale = None


def _gathered_in_fp8(model: nn.Module) -> list[Any]:
    sharded = (one for one in model.parameters() if isinstance(one, DTensor))
    return [one for one in sharded if hasattr(one._local_tensor, "_precomputed_scale")]
