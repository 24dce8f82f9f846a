"""Muon: orthogonalizes the updates of the matrices in blocks, so that all singular values are near one (Jordan et al., "Muon",
2024). Then scales these updates so that a learning rate and weight decay tuned for AdamW can be used (Liu et al., "Muon is
scalable for LLM training", 2025). Other parameters use AdamW.

Each matrix is orthogonalized as a whole, on one rank. At a time, the ranks take as many matrices of one shape as there are
ranks. They exchange shards so that each rank has one whole matrix, orthogonalize, and exchange the shards back. So the update
is the same at any world size.

Shape suffixes: M and N rows and columns of a matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from springtide.checkpoint.tensors import local
from springtide.optim.adam import ShardAdamW, sharded_over

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_RMS = 0.2
"""Typical root mean square of an AdamW update, to which Muon's updates are scaled."""


class Muon(ShardAdamW):
    """Muon for the parameter groups ``matrices``, and AdamW with the options ``adamw`` for the parameter groups
    ``groups``."""

    def __init__(self, matrices: list[dict[str, Any]], groups: list[dict[str, Any]], **adamw: Any) -> None:
        super().__init__([*matrices, *groups], **adamw)
        self._num_matrices = len(matrices)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure`` is not used. All ranks must call ``step`` together."""
        groups = self.param_groups
        self.param_groups = groups[self._num_matrices :]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for own in groups[: self._num_matrices]:
            moved = [parameter for parameter in own["params"] if parameter.grad is not None]
            for shape, same in itertools.groupby(sorted(moved, key=_shape), key=_shape):
                scale = own["lr"] * _RMS * max(shape) ** 0.5
                for parameter, direction in _orthogonal(same, self._direction):
                    parameter.mul_(1.0 - own["lr"] * own["weight_decay"]).add_(direction, alpha=-scale)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Update the momentum. Returns this rank's shard of the gradient plus ``_MOMENTUM`` times the momentum (Nesterov)."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient, momentum = local(parameter.grad), local(state["momentum"])
        momentum.mul_(_MOMENTUM).add_(gradient)
        return gradient.add(momentum, alpha=_MOMENTUM)


def _shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape)


def _orthogonal(same: Iterable[Tensor], direction: Callable[[Tensor], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs: this rank's shard of a parameter, and this rank's shard of the parameter's orthogonalized ``direction``. All
    parameters in ``same`` have one shape."""
    parameters = list(same)
    size, rank, group = sharded_over(parameters[0])
    for begin in range(0, len(parameters), size):
        some = parameters[begin : begin + size]
        shards = [direction(parameter) for parameter in some]
        if size == 1:
            moved = [orthogonalized(shard) for shard in shards]
        else:
            moved = _each_does_one(shards, parameters[0].shape, size, rank, group)
        yield from zip(map(local, some), moved, strict=True)


def _each_does_one(shards: list[Tensor], shape: torch.Size, size: int, rank: int, group: Any) -> list[Tensor]:
    """Orthogonalize at most ``size`` matrices (M, N), one on each rank. ``shards``: this rank's shards of the matrices, cut by
    rows as torch.chunk does. Returns this rank's shards of the orthogonalized matrices."""
    M, N = shape
    most = -(-M // size)
    held = [max(0, min(most, M - one * most)) * N for one in range(size)]
    mine = [held[rank] if one < len(shards) else 0 for one in range(size)]
    parts = held if rank < len(shards) else [0] * size
    whole = shards[0].new_empty(sum(parts))
    dist.all_to_all_single(whole, torch.cat([shard.flatten() for shard in shards]), parts, mine, group=group)
    if rank < len(shards):
        whole = orthogonalized(whole.view(M, N)).flatten()
    back = shards[0].new_empty(sum(mine))
    dist.all_to_all_single(back, whole, mine, parts, group=group)
    return [part.view_as(shards[0]) for part in back.split(held[rank])] if held[rank] else shards


def orthogonalized(matrix_MN: Tensor) -> Tensor:
    """Return an almost orthogonal matrix with the same singular vectors: five Newton-Schulz steps bring singular values from
    anywhere in (0.01, 1] to between 0.7 and 1.2. The steps are computed in bf16 on a GPU."""
    a, b, c = _COEFFICIENTS
    found = matrix_MN.bfloat16() if matrix_MN.is_cuda else matrix_MN
    tall = found.size(0) > found.size(1)
    found = found.T if tall else found
    found = found / (found.norm() + 1e-7)
    for _ in range(_STEPS):
        square = found @ found.T
        found = a * found + (b * square + c * square @ square) @ found
    return (found.T if tall else found).to(matrix_MN.dtype).contiguous()
