"""Optional metrics of a step (``train.metrics``): the largest logit and the gradient noise scale. Their inputs travel in the
step's message, so they cost no further all-reduce.

Noise scale (McCandlish et al., "An empirical model of large-batch training", 2018, appendix A). A step's gradient is the sum of
the gradients of pieces. A piece is one micro-batch of a rank. Where gradients are reduced only once per step, a piece is all
micro-batches of a rank. Let g be the sum of the gradients of n tokens, G the mean gradient of a token, and S the summed
variance of its elements:

    E |g|^2 = n^2 |G|^2 + n S

This holds for the sum over the pieces and for the whole step, which gives two equations for |G|^2 and S. The noise scale is S /
|G|^2, in tokens. The estimates of |G|^2 and S are unbiased, for pieces of unequal size too, so the ratio of their averages over
steps is reported. If gradients are not sharded, the only piece of a process is its first micro-batch, and a step needs at least
two micro-batches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from springtide.distributed import World
from springtide.distributed.fsdp import reduces_each
from springtide.model import LargestLogit, logits_watched
from springtide.optim.build import local_gradients, square_norm
from springtide.training.losses import Compute, MicroBatch, loss_mask
from springtide.training.message import StepMessage
from springtide.training.part import Part, Share, StepResult

_LARGEST, _NOISE = "largest_logit", "noise_scale"
_SHARE = 1 / 32
"""Weight of the newest step in the moving averages of the noise scale's terms."""


class StepMetrics(Part):
    """Optional metrics of one worker group's steps."""

    def __init__(self, names: Sequence[str], model: nn.Module, world: World) -> None:
        self._model, self._world = model, world
        self._tells_largest, self._tells_noise = _LARGEST in names, _NOISE in names
        self._squares = watch_gradients(model, world.device) if self._tells_noise else None
        self._each = self._squares is not None and reduces_each(model)
        self._average = NoiseScale()
        self._largest = LargestLogit(world.device)
        self._loss_weight = 1.0

    def wrap_compute(self, compute: Compute) -> Compute:
        """Reset the sums of the step. Return a wrapper of ``compute`` that observes logits and gradients."""
        self._largest = LargestLogit(self._world.device)
        self._pieces = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        """Sums over the pieces of this rank (micro-batches that are reduced together): squared gradient norms, squared numbers
        of tokens, numbers of tokens."""
        if self._squares is not None:
            self._squares.take()  # discard the sum that a failed step may have left

        def watched(model: nn.Module, one: MicroBatch) -> Tensor:
            with logits_watched(self._largest) if self._tells_largest else contextlib.nullcontext():
                found = compute(model, one)
            if self._tells_noise:
                self._after_micro_batch(one.number, loss_mask(one.rows).sum())
            return found

        return watched

    def _after_micro_batch(self, index: int, num_tokens: Tensor) -> None:
        """Update the sums of this rank after the backward of micro-batch ``index``, which has ``num_tokens`` tokens."""
        if self._each:
            self._pieces[1:] += torch.stack([num_tokens.double().square(), num_tokens.double()])
        elif self._squares is None and index == 0:
            gradients = local_gradients(self._model)
            self._pieces += torch.stack(
                [square_norm(gradients).to(self._world.device), num_tokens.double().square(), num_tokens.double()]
            )

    def contribute(self, message: StepMessage, share: Share) -> None:
        self._loss_weight = share.loss_weight
        if self._tells_largest:
            message.by_rank(_LARGEST, self._largest.value)
        if self._tells_noise:
            if self._squares is not None:
                self._pieces[0] = self._squares.take()
                if not self._each:
                    num_tokens = share.row_tokens.sum()
                    self._pieces[1:] = torch.stack([num_tokens.square(), num_tokens])
            message.sum(_NOISE, self._pieces)

    def receive(self, result: StepResult) -> None:
        if self._tells_largest:
            result.extra[_LARGEST] = max(result.agreed[_LARGEST])
        if self._tells_noise:
            pieces, squared_counts, counts = result.agreed[_NOISE]
            weight, square = self._loss_weight**2, (result.agreed["square"] ** 0.5) ** 2
            noise = self._average.after(pieces / weight, squared_counts, counts, square / weight, result.tokens)
            if noise is not None:
                result.extra[_NOISE] = noise


class NoiseScale:
    """Moving average of the noise scale over steps. Checkpoints do not contain it, so a new worker group starts a new average.

    Examples:
        >>> average = NoiseScale()
        >>> average.after(72.0, 52.0, 10.0, 120.0, 10.0)  # pieces of 4 and 6 tokens, |G|^2 = 1 and S = 2
        2.0
        >>> average.after(5.0, 100.0, 10.0, 5.0, 10.0) is None  # one piece says nothing
        True
    """

    def __init__(self) -> None:
        self._square = self._variance = 0.0

    def after(self, pieces: float, squared_counts: float, counts: float, square: float, tokens: float) -> float | None:
        """Add a step to the averages. Returns the noise scale [tokens]; None if it cannot be estimated.

        Args:
            pieces: sum of the squared gradient norms of the step's pieces.
            squared_counts: sum of the squared numbers of tokens of the pieces.
            counts: sum of the numbers of tokens of the pieces.
            square: squared norm of the whole step's gradient, which is a sum over ``tokens`` tokens.
            tokens: number of tokens of the step.
        """
        # determinant of the two equations in the module's docstring; 0 if the step is a single piece
        determinant = squared_counts * tokens - counts * tokens**2
        if not determinant or not math.isfinite(pieces) or not math.isfinite(square):
            return None
        found = (pieces * tokens - counts * square) / determinant
        variance = (square - tokens**2 * found) / tokens
        self._square += _SHARE * (found - self._square)
        self._variance += _SHARE * (variance - self._variance)
        return max(self._variance, 0.0) / self._square if self._square > 0 else None


# The squared norm of each rank's own gradients before they are reduced. FSDP does not keep these gradients in memory, so the
# norm is that of the input buffer of the reduce-scatter. Nothing is computed twice, and nothing waits for the device.


class GradientSquares:
    """Custom reduce-scatter for FSDP that also sums the squares of its inputs. FSDP calls ``allocate`` for the input, fills the
    input, and calls ``allocate`` for the output. Then it calls the object itself if a copy of the model has several shards."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._input: Tensor | None = None

    def take(self) -> Tensor:
        """Return the sum of the squared gradients since the last call, a float64 scalar, and reset it. Call it after
        backward."""
        found, self._sum = self._sum, torch.zeros_like(self._sum)
        return found

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory, alternately for an input of the reduce-scatter and for its output. When FSDP asks for the output, it
        has filled the input, so the squares of the input are summed then."""
        if self._input is None:
            self._input = torch.empty(math.prod(size), dtype=dtype, device=device)
            return self._input
        whole, self._input = self._input, None
        self._sum += torch.linalg.vector_norm(whole, dtype=torch.float64).square()
        return torch.empty(math.prod(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Sum the input over the ranks of ``group`` and write this rank's shard of the sum to the output."""
        work: dist.Work | None = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        return work


def watch_gradients(model: nn.Module, device: torch.device) -> GradientSquares | None:
    """Install a ``GradientSquares`` in all sharded modules of ``model`` and return it; None if none is sharded."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        return None
    found = GradientSquares(device)
    for module in sharded:
        module.set_custom_reduce_scatter(cast(Any, found))  # the type of the argument is not public in torch
    return found
