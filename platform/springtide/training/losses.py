"""Forward and backward of a micro-batch. The loss is the cross-entropy of next tokens, or a configured objective.

Shape suffixes: B rows, L positions, V ids, N tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from springtide.errors import TrainingFailed
from springtide.model import IGNORE_INDEX, are_watched, see_logits
from springtide.model.objective import Columns, Objective

_PER_NAT = 2.0**24
"""A row's cross-entropy is rounded to a multiple of 1 / 2**24 nats, so that sums over rows are exact (``row_losses``)."""
NO_COLUMNS: Columns = {}


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """The loss that a step minimises."""

    z_weight: float = 0.0
    """Weight of z-loss, the squared logarithm of the softmax's denominator (``optim.z_loss``)."""
    objective: Objective | None = None
    """Objective that is minimised instead of the cross-entropy of next tokens; None for the cross-entropy."""

    def weight(self, sums: Sequence[float], num_tokens: float) -> float:
        """Return the divisor of a step's loss: its number of tokens, or the total weight of the objective.

        Args:
            sums: the objective's sums, or the cross-entropies, added up over all ranks and micro-batches.
            num_tokens: predicted tokens of all ranks.

        Raises:
            TrainingFailed: the weight of the objective is not above 0.
        """
        return self.objective.checked_weight(sums) if self.objective else num_tokens

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the terms of the objective by name, each divided by the objective's total weight. ``sums``: as in
        ``weight``."""
        return self.objective.metrics_from_sums(sums) if self.objective else {}


class MicroBatch(NamedTuple):
    """Everything that the result of a micro-batch depends on, except the weights and random numbers."""

    rows: Tensor
    """Token ids, int64 (B, L + 1). A token that the loss ignores is ``~id``, a negative number (``shards.signed``)."""
    loss_weight: float
    """Factor by which the summed loss is multiplied before backward."""
    loss: LossOptions
    padded_rows: int = 0
    """Number of rows to which the micro-batch is padded."""
    columns: Mapping[str, Tensor] = NO_COLUMNS
    """Label columns of the rows by name, (B, ...) each: inputs of a custom objective."""
    number: int = 0
    """Index among the micro-batches of this rank in the step."""


Compute = Callable[[nn.Module, MicroBatch], Tensor]
"""Runs forward and backward of a micro-batch. Returns the cross-entropy of each row, as ``row_losses`` does. With an objective:
returns the objective's sums, (size,), of which the first is minimised."""


def compute(model: nn.Module, one: MicroBatch) -> Tensor:
    """Run forward and backward of a micro-batch. Parts (features of a step) may wrap this function."""
    total, sums = loss_of(model, one)
    (total * one.loss_weight).backward()
    return sums


def loss_of(model: nn.Module, one: MicroBatch) -> tuple[Tensor, Tensor]:
    """Run forward of a micro-batch. Returns the scalar to minimise, and what ``compute`` returns: the cross-entropy of each
    row, or the objective's sums."""
    objective = one.loss.objective
    if objective is None:
        return row_losses(model, one.rows, one.loss.z_weight, one.padded_rows)
    tokens_BL, targets_BL = _padded(one.rows, one.padded_rows)
    outputs_BLV, B = _checked(model(tokens_BL), targets_BL), len(one.rows)
    if are_watched():
        see_logits(outputs_BLV.detach().flatten(0, 1), targets_BL.flatten() != IGNORE_INDEX)
    # do not pass padding rows to the objective, which may count rows
    return objective(outputs_BLV[:B] if B else outputs_BLV, tokens_BL[:B], targets_BL[:B], one.columns)


def row_losses(model: nn.Module, rows_BL: Tensor, z_weight: float = 0.0, padded_rows: int = 0) -> tuple[Tensor, Tensor]:
    """Return the loss of ``rows_BL`` (B, L + 1), summed over its tokens, an fp32 scalar. Also return the cross-entropy of each
    row, float64 (B,), without gradient. Only the loss includes z-loss, as in ``head_loss``.

    The rows are padded up to ``padded_rows``, so that a compiled model is called with a single shape; padding rows add nothing
    to the losses. A rank without rows still runs the model, on one padding row, because the collectives of the other ranks wait
    for it. Raises TrainingFailed if the model does not return logits (B, L, V)."""
    tokens_BL, targets_BL = _padded(rows_BL, padded_rows)
    if getattr(model, "computes_loss", False):
        total, nats_N = model(tokens_BL, targets_BL, z_weight)
    else:
        total, nats_N = _of_logits(model(tokens_BL), targets_BL, z_weight)
    nats_B = nats_N.view_as(targets_BL)[: len(rows_BL)].sum(dim=1, dtype=torch.float64)
    # round to multiples of 2**-24. Sums of them below 2**29 are exact, so they do not depend on which rank has which row
    return total, torch.round(nats_B * _PER_NAT) / _PER_NAT


@torch.no_grad()
def row_nats(model: nn.Module, rows_BL: Tensor, padded_rows: int = 0) -> Tensor:
    """Return the cross-entropy of each row of ``rows_BL`` (B, L + 1), summed over its tokens, float64 (B,). Rows are padded,
    and errors raised, as in ``row_losses``."""
    tokens_BL, targets_BL = _padded(rows_BL, padded_rows)
    if getattr(model, "computes_loss", False):
        nats_BL = model(tokens_BL, targets_BL, by_token=True)
    else:
        logits_NV, wanted_N = _logits(model(tokens_BL), targets_BL), targets_BL.flatten()
        nats_N = F.cross_entropy(logits_NV, wanted_N, ignore_index=IGNORE_INDEX, reduction="none")
        nats_BL = nats_N.view_as(targets_BL)
    return nats_BL[: len(rows_BL)].double().sum(dim=1)


def _padded(rows_BL: Tensor, padded_rows: int) -> tuple[Tensor, Tensor]:
    """Return ids and targets of the rows, int64 (B, L) each, padded to ``padded_rows`` rows and at least one. Targets that the
    loss ignores are IGNORE_INDEX."""
    B, num_missing = len(rows_BL), max(1, padded_rows) - len(rows_BL)
    if num_missing > 0:
        rows_BL = F.pad(rows_BL, (0, 0, 0, num_missing))
    tokens_BL = rows_BL[:, :-1]
    tokens_BL = torch.where(tokens_BL < 0, ~tokens_BL, tokens_BL)
    targets_BL = rows_BL[:, 1:].masked_fill(~loss_mask(rows_BL), IGNORE_INDEX)
    if num_missing > 0:
        targets_BL[B:] = IGNORE_INDEX
    return tokens_BL, targets_BL


def _of_logits(logits_BLV: Any, targets_BL: Tensor, z_weight: float) -> tuple[Tensor, Tensor]:
    logits_NV, wanted_N = _logits(logits_BLV, targets_BL), targets_BL.flatten()
    if are_watched():
        see_logits(logits_NV, wanted_N != IGNORE_INDEX)
    nats_N = F.cross_entropy(logits_NV, wanted_N, ignore_index=IGNORE_INDEX, reduction="none")
    extra = (logits_NV.logsumexp(-1).square() * (wanted_N != IGNORE_INDEX)).sum() if z_weight else 0.0
    return nats_N.sum() + z_weight * extra, nats_N.detach()


def _logits(logits_BLV: Any, targets_BL: Tensor) -> Tensor:
    """Return the logits as fp32 (N, V). Raises TrainingFailed if they are not a tensor (B, L, V)."""
    return _checked(logits_BLV, targets_BL).flatten(0, 1).float()


def _checked(logits_BLV: Any, targets_BL: Tensor) -> Tensor:
    """Return ``logits_BLV``, the output of a model, after a check of type and shape. Raises TrainingFailed if the output is not
    a tensor (B, L, V)."""
    if not isinstance(logits_BLV, Tensor) or logits_BLV.dim() != 3 or logits_BLV.shape[:2] != targets_BL.shape:
        B, L = targets_BL.shape
        found = tuple(logits_BLV.shape) if isinstance(logits_BLV, Tensor) else f"a {type(logits_BLV).__name__}"
        raise TrainingFailed(f"the model returned {found} for ids ({B}, {L}); return logits ({B}, {L}, ids)")
    return logits_BLV


def loss_mask(rows_BL: Tensor) -> Tensor:
    """Return which tokens of rows (B, L + 1) the loss predicts, bool (B, L). The first token of a row is never predicted, so it
    has no entry."""
    return rows_BL[:, 1:] >= 0


# Split the rows of a worker in a step into micro-batches. Every worker gets the same number of them.


def micro_batches(
    lane_rows: Sequence[int], rows_per_lane: int, most_lanes: int, micro_batch: int, by_lane: bool
) -> list[slice]:
    """Return the micro-batches of a worker as slices of its rows in this step. ``lane_rows``: number of rows in each of its
    lanes (fixed shares of every batch).

    Each micro-batch runs collectives, so every worker must have the same number of micro-batches: as many as a worker with
    ``most_lanes`` lanes needs. A worker with fewer lanes gets some empty ones. ``rows_per_lane``: rows of a full lane.
    ``micro_batch``: largest number of rows in a micro-batch. ``by_lane``: True if no micro-batch may hold rows of two lanes.
    Then the same rows are computed together at any world size.
    """
    # a cell is a group of rows that is split by itself: one lane, or all rows of the worker
    cells, most_cells = (list(lane_rows), most_lanes) if by_lane else ([sum(lane_rows)], 1)
    parts = -(-_most_rows(rows_per_lane, most_lanes, by_lane) // micro_batch)
    found, begin = [], 0
    for rows in cells:
        bounds = [begin + part * rows // parts for part in range(parts + 1)]
        found += [slice(first, last) for first, last in itertools.pairwise(bounds)]
        begin += rows
    return found + [slice(begin, begin)] * ((most_cells - len(cells)) * parts)


def largest_micro_batch(rows_per_lane: int, most_lanes: int, micro_batch: int, by_lane: bool) -> int:
    """Return the number of rows of the largest micro-batch of any worker in a step. All micro-batches can be padded to this
    number, so that they have a single shape. The arguments are those of ``micro_batches``."""
    rows = _most_rows(rows_per_lane, most_lanes, by_lane)
    return -(-rows // -(-rows // micro_batch))


def _most_rows(rows_per_lane: int, most_lanes: int, by_lane: bool) -> int:
    """Return the largest number of rows that are split into micro-batches together: the rows of a lane, or all rows of a
    worker."""
    return rows_per_lane if by_lane else most_lanes * rows_per_lane
