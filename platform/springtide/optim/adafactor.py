"""Adafactor: keeps one second moment for each row and each column of a matrix, and no first moments (Shazeer and Stern,
"Adafactor: adaptive learning rates with sublinear memory cost", 2018, algorithms 4 and 5 with their constants).

The step size is relative to the weights: the learning rate is multiplied by the root mean square of the tensor, or by 0.001 if
that is larger. The learning rate follows ``optim.schedule``, and weight decay is decoupled. Two all-reduces per step sum
squares: one over columns, one over whole tensors. They run in float64, so that the bits of the sums do not depend on where
shards are cut.

Shape suffixes: M rows of a tensor, R elements in a row (all dimensions after the first).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from springtide.checkpoint.tensors import local
from springtide.optim.adam import sharded_over

_DECAY = 0.8
"""At each step second moments are multiplied by 1 - step ** -_DECAY."""
_SQUARE, _LEAST = 1e-30, 1e-3
"""``_SQUARE`` is added to squared gradients. The rate is multiplied by the tensor's root mean square, or by ``_LEAST`` if that
is larger."""
_CLIP = 1.0
"""Largest root mean square of an update; larger updates are scaled down to it."""
_AT_ONCE = 2**22
"""Number of gradient elements that are converted to float64 and squared at a time, to save memory."""


class Adafactor(torch.optim.Optimizer):
    """Adafactor for the parameter groups ``groups``. A vector has one second moment for each element."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure`` is not used. All ranks must call ``step`` together."""
        moved = [(one, group) for group in self.param_groups for one in group["params"] if one.grad is not None]
        if not moved:
            return
        self._advance([one for one, _ in moved])
        squares = torch.stack(
            [_square(tensor) for one, _ in moved for tensor in (self._update(one), local(one.detach()))]
        )
        _sum_shards(squares, moved[0][0])
        for number, (parameter, group) in enumerate(moved):
            means = squares[2 * number : 2 * number + 2] / max(1, parameter.numel())
            of_update, of_weight = means.sqrt().to(parameter.dtype).unbind()
            # compute each update a second time: keeping the updates of all tensors would take as much memory as the weights
            update = self._update(parameter).div_((of_update / _CLIP).clamp_min(1.0))
            weight = local(parameter.detach())
            weight.mul_(1.0 - group["lr"] * group["weight_decay"])
            weight.sub_(update.mul_(of_weight.clamp_min(_LEAST) * group["lr"]))

    def _advance(self, parameters: list[Tensor]) -> None:
        """Update the second moments from the gradients."""
        sums = [_sums(local(one.grad)) for one in parameters if one.dim() >= 2 and one.grad is not None]
        if sums:
            _sum_shards(columns := torch.cat([by_column for _, by_column in sums]), parameters[0])
            whole = iter(columns.split([len(by_column) for _, by_column in sums]))
        rows = iter(by_row for by_row, _ in sums)
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros(())
                state.update(_new_moments(parameter))
            state["step"].add_(1.0)
            share = float(state["step"]) ** -_DECAY
            if parameter.dim() >= 2:
                M, R = len(parameter), math.prod(parameter.shape[1:])
                _mix(local(state["row_sq"]), next(rows) / R + _SQUARE, share)
                _mix(state["column_sq"], next(whole) / M + _SQUARE, share)
            else:
                assert parameter.grad is not None
                gradient = local(parameter.grad)
                _mix(local(state["exp_avg_sq"]), gradient * gradient + _SQUARE, share)

    def _update(self, parameter: Tensor) -> Tensor:
        """Return this rank's shard of the gradient divided by the root of its second moment."""
        state = self.state[parameter]
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        if parameter.dim() < 2:
            return gradient / local(state["exp_avg_sq"]).sqrt()
        # use the mean of column_sq, which is whole on every rank. row_sq is sharded, and its mean is equal
        mean = state["column_sq"].double().mean().to(parameter.dtype)
        update_MR = _matrix(gradient) / (local(state["row_sq"]) / mean).sqrt_()[:, None]
        return update_MR.div_(state["column_sq"].sqrt()).view_as(gradient)


def _new_moments(parameter: Tensor) -> dict[str, Tensor]:
    if parameter.dim() < 2:
        return {"exp_avg_sq": torch.zeros_like(parameter)}
    shard = local(parameter)
    return {
        "row_sq": sharded_as(parameter, shard.new_zeros(len(shard)), (len(parameter),)),
        "column_sq": shard.new_zeros(math.prod(shard.shape[1:])),  # not sharded: equal on all ranks
    }


def sharded_as(parameter: Tensor, shard: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return this rank's ``shard`` as a DTensor of the full ``shape``, with rows sharded like the rows of ``parameter``. If
    ``parameter`` is no DTensor, return ``shard`` itself."""
    if not isinstance(parameter, DTensor):
        return shard
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _sums(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared gradients of this rank's M rows, summed per row and per column, float64 (M,) and (R,)."""
    gradient_MR = _matrix(gradient)
    M, R = gradient_MR.shape
    by_row = gradient.new_zeros(M, dtype=torch.float64)
    by_column = gradient.new_zeros(R, dtype=torch.float64)
    for rows in _parts(M, R):
        squares = gradient_MR[rows].double().square()
        by_row[rows] = squares.sum(1)
        by_column += squares.sum(0)
    return by_row, by_column


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))


def _parts(M: int, R: int) -> Iterator[slice]:
    most = max(1, _AT_ONCE // max(1, R))
    yield from (slice(begin, begin + most) for begin in range(0, M, most))


def _square(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()


def _mix(moment: Tensor, newest: Tensor, share: float) -> None:
    # multiply and add in separate kernels: a fused kernel may round the last elements of a shard differently, so the result
    # would depend on where shards are cut
    moment.mul_(1.0 - share).add_((newest * share).to(moment.dtype))


def _sum_shards(values: Tensor, parameter: Tensor) -> None:
    size, _, group = sharded_over(parameter)
    if size > 1:
        dist.all_reduce(values, group=group)
