"""AdamW on a rank's local shards, and LAMB.

AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019): torch's AdamW works on DTensors. At the first step
on a device mesh, DTensor derives the placement of each result, weight by weight. For a small model this takes 0.2 s of CPU
time, and it is repeated after each change of the number of ranks. An update of a shard needs no other shard, so ``ShardAdamW``
updates plain local shards.

LAMB, for very large batches: Adam's update of each matrix is scaled to the norm of the matrix (You et al., "Large batch
optimization for deep learning: training BERT in 76 minutes", 2020, algorithm 2, with the identity as phi).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from springtide.checkpoint.tensors import local


class ShardAdamW(torch.optim.AdamW):
    """AdamW whose state is sharded like the parameters. Each rank updates only its own shards."""

    HAS_STATE_OF_ADAMW = True
    """Marks this class for ``checkpoint.tensors``: its state has the form of the state of torch's AdamW. Subclasses such as
    Muon do not inherit the mark, because their state differs."""

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        """Collect a parameter group's tensors as local shards: parameters, gradients, moments, and step counts."""
        has_complex = bool(super()._init_group(group, *tensors))
        for some in tensors:
            some[:] = map(local, some)
        return has_complex


class Lamb(torch.optim.Optimizer):
    """LAMB for the parameter groups ``groups``. Vectors, such as norms and biases, get Adam's update, as in the paper's
    experiments."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure`` is not used. All ranks must call ``step`` together."""
        moved = [(one, group) for group in self.param_groups for one in group["params"] if one.grad is not None]
        for parameter, group in moved:
            self._advance(parameter, *group["betas"])
        ratios = iter(self._trust_ratios([(one, group) for one, group in moved if one.dim() >= 2]))
        for parameter, group in moved:
            # compute each update a second time: keeping the updates of all tensors would take as much memory as the weights
            update = self._update(parameter, group).mul_(group["lr"])
            local(parameter).sub_(update.mul_(next(ratios)) if parameter.dim() >= 2 else update)

    def _advance(self, parameter: Tensor, beta1: float, beta2: float) -> None:
        """Update the moments. Here and in ``_update`` multiplications and additions run in separate kernels: a fused kernel may
        round the end of a shard differently, so the result would depend on where shards are cut."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        state["step"].add_(1.0)
        local(state["exp_avg"]).mul_(beta1).add_(gradient * (1.0 - beta1))
        local(state["exp_avg_sq"]).mul_(beta2).add_((gradient * gradient).mul_(1.0 - beta2))

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return this rank's shard of Adam's update, including weight decay."""
        (beta1, beta2), state = group["betas"], self.state[parameter]
        steps = float(state["step"])
        root = (local(state["exp_avg_sq"]) / (1.0 - beta2**steps)).sqrt_().add_(group["eps"])
        update = (local(state["exp_avg"]) / (1.0 - beta1**steps)).div_(root)
        return update.add_(local(parameter.detach()) * group["weight_decay"]) if group["weight_decay"] else update

    def _trust_ratios(self, matrices: list[tuple[Tensor, dict[str, Any]]]) -> list[Tensor]:
        """Return the norm of each matrix divided by the norm of its update, in the matrix's dtype; 1 where a norm is 0."""
        if not matrices:
            return []
        squares = torch.stack(
            [
                torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
                for one, group in matrices
                for tensor in (local(one.detach()), self._update(one, group))
            ]
        )
        size, _, process_group = sharded_over(matrices[0][0])
        if size > 1:
            dist.all_reduce(squares, group=process_group)  # float64: sums do not depend on how shards are cut
        weights, updates = squares.sqrt().view(-1, 2).unbind(1)
        ratios = torch.where((weights > 0) & (updates > 0), weights / updates, 1.0)
        return [ratio.to(one.dtype) for ratio, (one, _) in zip(ratios, matrices, strict=True)]


def sharded_over(parameter: Tensor) -> tuple[int, int, Any]:
    """Return the number of ranks that hold shards of a parameter, this rank's index among them, and their process group."""
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if placement.is_shard():
                mesh = parameter.device_mesh
                return mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis)
    return 1, 0, None
