"""Figures of a step that are told on request (``train.metrics``). What they need travels in the all-reduce that each step has.

Noise scale (McCandlish et al., "An empirical model of large-batch training", 2018, appendix A). A step's gradient is the sum of
the gradients of pieces: of each rank's micro-batches, or of a rank's whole part where only their sum is reduced. For the sum g
of n tokens' gradients, whose mean is G and whose variances add up to S

    E |g|^2 = n^2 |G|^2 + n S

Added up over the pieces, and for the whole step, these are two equations for |G|^2 and S; the noise scale is S / |G|^2, in
tokens. The estimates are unbiased, for pieces of unequal size too, so averages of both are divided. One process whose gradients
are not sharded compares its first micro-batch with the step, if it has two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from springtide.dist import World
from springtide.model import LargestLogit
from springtide.parallel import reduces_each, watch_gradients
from springtide.training.optim import local_gradients, square_norm

_LARGEST, _NOISE = "largest_logit", "noise_scale"
_SHARE = 1 / 32
"""Share of a step in the averages."""


class StepMetrics:
    """The figures of one worker group's steps: ``begin``, ``after_micro_batch``, ``sums``, ``told``, in each step."""

    def __init__(self, names: Sequence[str], model: nn.Module, world: World) -> None:
        self._model, self._world = model, world
        self._tells_largest, self._tells_noise = _LARGEST in names, _NOISE in names
        self._squares = watch_gradients(model, world.device) if self._tells_noise else None
        self._each = self._squares is not None and reduces_each(model)
        self._average = NoiseScale()
        self.largest: LargestLogit | None = None
        """Sees the logits of the current step; None if it is not told."""

    def begin(self) -> None:
        """Begin a step."""
        if self._tells_largest:
            self.largest = LargestLogit(self._world.device)
        self._pieces = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        """Squared norms, squared tokens and tokens, summed over pieces."""
        if self._squares is not None:
            self._squares.take()  # nothing, unless a step has failed

    def after_micro_batch(self, index: int, num_tokens: Tensor) -> None:
        """Look at the gradients after the backward of micro-batch ``index``, of ``num_tokens``."""
        if not self._tells_noise:
            return
        if self._each:
            self._pieces[1:] += torch.stack([num_tokens.double().square(), num_tokens.double()])
        elif self._squares is None and index == 0:
            gradients = local_gradients(self._model)
            self._pieces += torch.stack(
                [square_norm(gradients).to(self._world.device), num_tokens.double().square(), num_tokens.double()]
            )

    def sums(self, num_tokens: Tensor) -> list[Tensor]:
        """Return this rank's float64 scalars to be summed over ranks; ``num_tokens``: of its part of the step."""
        found: list[Tensor] = []
        if self.largest is not None:
            slots = torch.zeros(self._world.size, dtype=torch.float64, device=self._world.device)
            slots[self._world.rank] = self.largest.value
            found += slots.unbind()
        if self._tells_noise:
            if self._squares is not None:
                self._pieces[0] = self._squares.take()
                if not self._each:
                    self._pieces[1:] = torch.stack([num_tokens.square(), num_tokens])
            found += self._pieces.unbind()
        return found

    def told(self, sums: Sequence[float], square: float, tokens: float, weight: float) -> dict[str, float]:
        """Return the figures, from sums over all ranks of which the last are those of ``sums``. ``square``: squared norm of
        the step's gradient of a loss that was multiplied by ``weight``; ``tokens``: of the step."""
        found: dict[str, float] = {}
        if self._tells_largest:
            end = len(sums) - 3 * self._tells_noise
            found[_LARGEST] = max(sums[end - self._world.size : end])
        if self._tells_noise:
            pieces, squared_counts, counts = sums[-3:]
            noise = self._average.after(pieces / weight**2, squared_counts, counts, square / weight**2, tokens)
            found |= {} if noise is None else {_NOISE: noise}
        return found


class NoiseScale:
    """Average of the noise scale over steps; a new worker group begins anew.

    Examples:
        >>> average = NoiseScale()
        >>> average.after(72.0, 52.0, 10.0, 120.0, 10.0)  # pieces of 4 and 6 tokens, |G|^2 = 1 and S = 2
        2.0
        >>> average.after(5.0, 100.0, 10.0, 5.0, 10.0) is None  # one piece says nothing
        True
    """

    def __init__(self) -> None:
        self._square = self._variance = self._weight = 0.0

    def after(self, pieces: float, squared_counts: float, counts: float, square: float, tokens: float) -> float | None:
        """Take a step into account; return the noise scale [tokens], None where it is not known.

        Args:
            pieces: squared norms of the gradients of the step's pieces, summed.
            squared_counts: squared numbers of their tokens, summed.
            counts: numbers of their tokens, summed.
            square: squared norm of the whole step's gradient, a sum over its ``tokens``.
            tokens: of the step.
        """
        determinant = squared_counts * tokens - counts * tokens**2
        if not determinant or not math.isfinite(pieces) or not math.isfinite(square):
            return None
        found = (pieces * tokens - counts * square) / determinant
        variance = (square - tokens**2 * found) / tokens
        self._weight += _SHARE * (1.0 - self._weight)
        self._square += _SHARE * (found - self._square)
        self._variance += _SHARE * (variance - self._variance)
        return max(self._variance, 0.0) / self._square if self._square > 0 else None
