"""Learning from pairs of answers, one chosen and one rejected, that are neighbouring documents of a row.

    row       [prompt, chosen] [prompt, rejected] [prompt, chosen] [prompt, rejected] [padding]
    document          0                 1                 2                 3           4, ...

Both answers of a pair are in one row, so whatever rows are computed together, a pair is whole.

Shape suffixes: B rows, L positions, V ids, P pairs of a row, of which most do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from springtide.model import IGNORE_INDEX, document_begins

Found = tuple[Tensor, Tensor, dict[str, Tensor]]
Columns = Mapping[str, Tensor]


_NO_MORE = -(2.0**-24)
"""Largest log-probability whose odds are computed: those of a certain answer, or of one without tokens, are infinite."""


class Pairs(NamedTuple):
    """Sums over the predicted tokens of each answer."""

    chosen: Tensor
    """(B, P)."""
    rejected: Tensor
    """(B, P)."""
    chosen_tokens: Tensor
    """Number of these tokens, (B, P)."""
    rejected_tokens: Tensor
    """(B, P)."""

    @property
    def exist(self) -> Tensor:
        """Whether both answers have a token that is predicted, bool (B, P)."""
        return (self.chosen_tokens > 0) & (self.rejected_tokens > 0)


def dpo(beta: float, eos_id: int, bos_id: int, are_whole: bool) -> Callable[[Tensor, Tensor, Tensor, Columns], Found]:
    """Return the objective of direct preference optimization (Rafailov et al., 2023, equation 7), summed over pairs.

    ``beta``: how much a departure from the reference costs. The log-probabilities of the reference are labels.
    """

    def of_pairs(outputs_BLV: Tensor, rows_BL: Tensor, labels_BL: Tensor, columns: Columns) -> Found:
        gain_BL = token_log_probabilities(outputs_BLV, labels_BL) - columns["logprobs"]
        pairs = by_pair(gain_BL, rows_BL, labels_BL, eos_id, bos_id, are_whole)
        chosen_BP, rejected_BP = beta * pairs.chosen, beta * pairs.rejected
        margin_BP = chosen_BP - rejected_BP
        parts = {"accuracy": (margin_BP > 0).float(), "margin": margin_BP}
        parts |= {"chosen": chosen_BP, "rejected": rejected_BP}
        return _summed(-F.logsigmoid(margin_BP), parts, pairs.exist)

    return of_pairs


def orpo(beta: float, eos_id: int, bos_id: int, are_whole: bool) -> Callable[[Tensor, Tensor, Tensor], Found]:
    """Return the objective of odds ratio preference optimization (Hong et al., 2024, equations 3 to 7), summed over pairs: the
    mean cross-entropy of the chosen answer's tokens, plus ``beta``, the paper's lambda, times that of the odds of both
    answers. The probability of an answer is the geometric mean of those of its tokens; there is no reference."""

    def of_pairs(outputs_BLV: Tensor, rows_BL: Tensor, labels_BL: Tensor) -> Found:
        pairs = by_pair(token_log_probabilities(outputs_BLV, labels_BL), rows_BL, labels_BL, eos_id, bos_id, are_whole)
        chosen_BP = pairs.chosen / pairs.chosen_tokens.clamp_min(1.0)
        rejected_BP = pairs.rejected / pairs.rejected_tokens.clamp_min(1.0)
        ratio_BP = log_odds(chosen_BP) - log_odds(rejected_BP)
        odds_BP = -F.logsigmoid(ratio_BP)
        parts = {"accuracy": (ratio_BP > 0).float(), "log_odds_ratio": ratio_BP}
        parts |= {"cross_entropy": -chosen_BP, "odds": odds_BP}
        return _summed(beta * odds_BP - chosen_BP, parts, pairs.exist)

    return of_pairs


def log_odds(log_probabilities: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of probabilities that are given as logarithms.

    Examples:
        >>> import torch
        >>> [f"{one:.4f}" for one in log_odds(torch.tensor([0.5, 0.8]).log()).tolist()]
        ['0.0000', '1.3863']
    """
    log_probabilities = log_probabilities.clamp_max(_NO_MORE)
    return log_probabilities - torch.log(-torch.expm1(log_probabilities))


def _summed(nats_BP: Tensor, parts: Mapping[str, Tensor], exist_BP: Tensor) -> Found:
    """Return the sums over pairs, and their number."""

    def total(values_BP: Tensor) -> Tensor:
        return values_BP.masked_fill(~exist_BP, 0.0).sum()

    return total(nats_BP), exist_BP.sum(), {name: total(one.detach()) for name, one in parts.items()}


def token_log_probabilities(outputs_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Return the log-probability of each token that comes next, fp32 (B, L); any number where nothing is predicted."""
    log_BLV = outputs_BLV.float().log_softmax(-1)
    return log_BLV.gather(-1, labels_BL.clamp_min(0)[..., None])[..., 0]


def by_pair(
    values_BL: Tensor, rows_BL: Tensor, labels_BL: Tensor, eos_id: int, bos_id: int, are_whole: bool = False
) -> Pairs:
    """Return the sums of ``values_BL`` over the predicted tokens of the answers of each pair.

    Examples:
        >>> import torch
        >>> rows = torch.tensor([[9, 1, 2, 9, 9, 3, 9, 9]])  # 9 ends and begins a document
        >>> labels = torch.tensor([[-100, 2, 9, -100, -100, 9, -100, -100]])
        >>> values = torch.arange(8.0)[None]
        >>> found = by_pair(values, rows, labels, 9, 9)
        >>> found.chosen[0, 0].item(), found.rejected[0, 0].item(), found.exist.sum().item()
        (3.0, 5.0, 1)
    """
    B, L = rows_BL.shape
    # of a target too: no first token is predicted
    document_BL = document_begins(rows_BL, eos_id, bos_id, are_whole).cumsum(1) - 1
    document_BL = document_BL.clamp_min(0)
    counts_BL = labels_BL != IGNORE_INDEX
    sums_BD = values_BL.new_zeros(B, L + L % 2).scatter_add(1, document_BL, values_BL.masked_fill(~counts_BL, 0.0))
    tokens_BD = torch.zeros_like(sums_BD).scatter_add(1, document_BL, counts_BL.to(sums_BD.dtype))
    return Pairs(sums_BD[:, 0::2], sums_BD[:, 1::2], tokens_BD[:, 0::2], tokens_BD[:, 1::2])
