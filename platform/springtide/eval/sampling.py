"""Draw the next token id of each row from the row's logits.

Shape suffixes: B rows, V ids.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from springtide.errors import CheckpointError, ConfigError, explain

_MOST_SEED = 2**63 - 1
_FP32 = torch.finfo(torch.float32)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options for drawing the next id. Raises ConfigError if a value is out of its limits."""

    temperature: float = 1.0
    """The logits are divided by this number; 0: always take the likeliest id."""
    top_k: int = 0
    """Draw from this many likeliest ids [ids]; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest ids that together have this probability (Holtzman et al., "The curious case of neural text
    degeneration", 2020); 1: from all."""
    seed: int = 0
    """Seed of the first row's draws; row i draws with seed + i."""

    def __post_init__(self) -> None:
        """Raise ConfigError if an option is out of its limits."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            remedy = "0 takes the likeliest id each time"
            raise ConfigError(explain("temperature", self.temperature, "must be at least 0", remedy))
        if self.top_k < 0:
            raise ConfigError(explain("top_k", self.top_k, "must be at least 0", "0 draws from all ids"))
        if not 0 < self.top_p <= 1:
            raise ConfigError(explain("top_p", self.top_p, "is not above 0 and at most 1", "1 draws from all ids"))
        if not 0 <= self.seed <= _MOST_SEED:
            raise ConfigError(explain("seed", self.seed, "must be from 0 to 2^63 - 1", "use 0"))

    def generators(self, num_rows: int) -> list[torch.Generator]:
        """Return one generator for each row, so that a row's draws depend on no other row."""
        return [torch.Generator().manual_seed((self.seed + row) % (_MOST_SEED + 1)) for row in range(num_rows)]


def draw(logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """Return one id for each row. A row's id depends on no other row.

    Args:
        logits_BV: logits in fp32, on the CPU.
        sampling: how ids are drawn; ``seed`` is not used here.
        generators: a random generator for each row.

    Raises:
        CheckpointError: a logit is NaN, or the largest logit of a row is infinite.
    """
    if not bool(torch.isfinite(logits_BV.amax(dim=1)).all()):
        raise CheckpointError("the model's logits are not numbers: its weights are damaged, or its training diverged")
    if sampling.temperature < _FP32.tiny:  # 0, or so small that fp32 may round it to 0
        return logits_BV.argmax(dim=1).tolist()
    # subtract each row's largest logit, which becomes 0: with a tiny temperature, a positive logit would overflow
    scaled_BV = (logits_BV - logits_BV.amax(dim=1, keepdim=True)) / min(sampling.temperature, _FP32.max)
    kept_BV = _nucleus(_likeliest(scaled_BV, sampling.top_k), sampling.top_p)
    shares_BV = torch.softmax(kept_BV, dim=-1)
    return [
        int(torch.multinomial(shares, 1, generator=generator))
        for shares, generator in zip(shares_BV, generators, strict=True)
    ]


def _likeliest(logits_BV: Tensor, top_k: int) -> Tensor:
    """Return the logits of each row with all but the ``top_k`` likeliest ids set to minus infinity."""
    if not 0 < top_k < logits_BV.shape[1]:
        return logits_BV
    values_BK, ids_BK = logits_BV.topk(top_k, dim=1)
    return torch.full_like(logits_BV, -math.inf).scatter(1, ids_BK, values_BK)


def _nucleus(logits_BV: Tensor, top_p: float) -> Tensor:
    """Keep the logits of the fewest likeliest ids with a total probability of ``top_p``; set all others to minus infinity."""
    if top_p == 1:
        return logits_BV
    values_BV, ids_BV = logits_BV.sort(dim=1, descending=True, stable=True)
    shares_BV = torch.softmax(values_BV, dim=1)
    before_BV = shares_BV.cumsum(dim=1) - shares_BV  # total probability of the ids that are likelier than this id
    is_cut_BV = before_BV >= top_p
    is_cut_BV[:, 0] = False  # the likeliest id always stays, even if fp32 rounds ``top_p`` to 0
    return torch.full_like(logits_BV, -math.inf).scatter(1, ids_BV, values_BV.masked_fill(is_cut_BV, -math.inf))
