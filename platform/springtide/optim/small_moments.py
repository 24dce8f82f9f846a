"""AdamW whose moments take 2 bytes or 1 byte per number instead of 4.

bf16 rounds both moments to 8 significant bits. int8 follows Dettmers et al., "8-bit optimizers via block-wise quantization"
(2022): a block of numbers is divided by its largest magnitude, and each number becomes the nearest of 256 values that lie
densely near zero. Blocks have 256 numbers, as in torchao and bitsandbytes, but no block spans two rows. So no shard cuts a
block, and a state saved at one world size has the same bytes at any other. In int8 mode the moments of vectors stay in fp32,
because vectors are small. The update uses the moments before they are rounded.

Shape suffixes: M rows of a tensor, R elements in a row, N blocks in a row, S numbers in a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from springtide.checkpoint.tensors import local
from springtide.errors import look_up
from springtide.optim.adafactor import sharded_as

_BLOCK = 256
_DECADES = 7
_ZERO = (0, 127)
"""8-bit code that stands for the value 0: in the unsigned table (second moments), then in the signed table (first moments)."""
_AT_ONCE = 2**22
"""Number of elements whose moments are converted to fp32 at a time."""
_FIRST, _SECOND, _SCALE = "exp_avg", "exp_avg_sq", "_scale"


class SmallMomentsAdamW(torch.optim.Optimizer):
    """AdamW for the parameter groups ``groups``, with moments stored in the format ``moments``: bf16 or int8."""

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, moments: str
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        stored: dict[str, tuple[_Storage, _Storage]] = {
            "bf16": (_Rounded(torch.bfloat16), _Rounded(torch.bfloat16)),
            "int8": (_Rounded(torch.float32), _Quantized()),
        }
        self._stored = look_up(stored, "optim.moments", moments)
        """Storage formats of moments: first for vectors, then for tensors with more dimensions."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure`` is not used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._advance(parameter, group)

    def _advance(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter, some rows at a time. Multiplications and additions run in separate kernels: a fused kernel may
        round the end of a shard differently, so the result would depend on where shards are cut."""
        state = self.state[parameter]
        stored = self._stored[parameter.dim() >= 2]
        if "step" not in state:
            state["step"] = torch.zeros(())
            state.update({k: v for name in (_FIRST, _SECOND) for k, v in stored.new(name, parameter).items()})
        state["step"].add_(1.0)
        assert parameter.grad is not None
        steps, (beta1, beta2), rate = float(state["step"]), group["betas"], group["lr"]
        shard, gradient = local(parameter.detach()), local(parameter.grad)
        shards = {key: local(value) for key, value in state.items()}
        for rows in _parts(shard):
            part = gradient[rows]
            first = stored.read(shards, _FIRST, rows).mul_(beta1).add_(part * (1.0 - beta1))
            second = stored.read(shards, _SECOND, rows).mul_(beta2).add_((part * part).mul_(1.0 - beta2))
            stored.write(shards, _FIRST, rows, first)
            stored.write(shards, _SECOND, rows, second)
            root = second.div_(1.0 - beta2**steps).sqrt_().add_(group["eps"])
            update = first.div_(1.0 - beta1**steps).div_(root).mul_(rate)
            shard[rows] = (shard[rows] * (1.0 - rate * group["weight_decay"])).sub_(update)


def _parts(shard: Tensor) -> Iterator[slice]:
    rows = len(shard)
    most = max(1, _AT_ONCE * rows // max(1, shard.numel()))
    yield from (slice(begin, begin + most) for begin in range(0, rows, most))


class _Storage(Protocol):
    """Interface of a storage format for moments. Argument ``state`` of its methods: key of a stored tensor -> this rank's shard
    of it."""

    def new(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors that store a new moment ``name`` of a parameter, all zeros: key in the state -> tensor."""

    def read(self, state: dict[str, Tensor], name: str, rows: slice) -> Tensor:
        """Return some ``rows`` of the moment ``name``, as a new fp32 tensor."""

    def write(self, state: dict[str, Tensor], name: str, rows: slice, values: Tensor) -> None:
        """Store ``values`` as the ``rows`` of the moment ``name``."""


class _Rounded:
    """Stores moments in a floating-point dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def new(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors that store a new moment ``name`` of a parameter, all zeros: key in the state -> tensor."""
        return {name: torch.zeros_like(parameter, dtype=self._dtype)}

    def read(self, state: dict[str, Tensor], name: str, rows: slice) -> Tensor:
        """Return some ``rows`` of the moment ``name``, as a new fp32 tensor."""
        return state[name][rows].to(torch.float32, copy=True)

    def write(self, state: dict[str, Tensor], name: str, rows: slice, values: Tensor) -> None:
        """Store ``values`` as the ``rows`` of the moment ``name``."""
        state[name][rows] = values.to(self._dtype)


class _Quantized:
    """Stores moments as 8-bit codes, and the largest magnitude of each block in fp32."""

    def __init__(self) -> None:
        self._known: dict[tuple[bool, torch.device], tuple[Tensor, Tensor]] = {}

    def new(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors that store a new moment ``name`` of a parameter, all zeros: key in the state -> tensor."""
        codes = torch.full_like(parameter, _ZERO[name == _FIRST], dtype=torch.uint8)
        num_blocks = -(-_width(parameter) // _BLOCK)
        shard = local(parameter).new_zeros(len(local(parameter)), num_blocks, dtype=torch.float32)
        return {name: codes, name + _SCALE: sharded_as(parameter, shard, (len(parameter), num_blocks))}

    def read(self, state: dict[str, Tensor], name: str, rows: slice) -> Tensor:
        """Return some ``rows`` of the moment ``name``, as a new fp32 tensor."""
        codes, scales_MN = state[name][rows], state[name + _SCALE][rows]
        values = self._values(name == _FIRST, codes.device)[0][codes.int()]
        each = scales_MN.repeat_interleave(_BLOCK, dim=1)[:, : _width(codes)]
        return values.mul_(each.view_as(values))

    def write(self, state: dict[str, Tensor], name: str, rows: slice, values: Tensor) -> None:
        """Store ``values`` as the ``rows`` of the moment ``name``."""
        M, R = len(values), _width(values)
        blocks_MNS = F.pad(values.reshape(M, R), (0, -R % _BLOCK)).view(M, -1, _BLOCK)
        scales_MN = blocks_MNS.abs().amax(-1)
        shares = blocks_MNS / torch.where(scales_MN > 0, scales_MN, 1.0)[:, :, None]
        edges = self._values(name == _FIRST, values.device)[1]
        codes = torch.bucketize(shares, edges, out_int32=True)
        if name == _SECOND:
            codes += (codes == 0) & (shares > 0)  # keep small values above 0: the update divides by their root
        codes = codes.view(M, -1)[:, :R]
        state[name][rows] = codes.reshape(values.shape).to(torch.uint8)
        state[name + _SCALE][rows] = scales_MN

    def _values(self, signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the value of each 8-bit code, and the midpoints between neighbouring values, at which rounding switches to the
        next code."""
        if (signed, device) not in self._known:
            values = _code_values(signed, device)
            self._known[signed, device] = values, (values[1:] + values[:-1]) / 2
        return self._known[signed, device]


def _width(tensor: Tensor) -> int:
    """Return the number of elements in a row of a tensor (all dimensions after the first)."""
    return math.prod(tensor.shape[1:])


def _code_values(signed: bool, device: torch.device) -> Tensor:
    """Return the value of each 8-bit code, ascending, fp32 (256,): 0, 1, and evenly spaced values in each decade below 1. Each
    decade has twice as many values as the next smaller decade (the paper's dynamic tree)."""
    found = [0.0, 1.0]
    for place in range(_DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (place + (not signed)) + 1, dtype=torch.float64)
        means = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (place + 1 - _DECADES)).tolist()
        found += means + [-one for one in means if signed]
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)
