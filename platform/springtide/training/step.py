"""One optimizer step, on one screen.

The loss is a sum over tokens divided by the number of valid tokens of the whole step, and gradients are summed over
ranks: neither the world size nor the micro-batch appears in the maths. Everything the ranks must agree on travels in one
all-reduce: loss, tokens, gradient norm, digest of the samples, requests to stop or save, joules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from springtide.dist import World, sum_over_ranks
from springtide.elastic import Interrupt
from springtide.errors import TrainingFailed
from springtide.model import IGNORE_INDEX, LargestLogit
from springtide.objective import Columns, Objective
from springtide.parallel import set_gradient_sync, weights_changed
from springtide.training.anchor import NUM_SUMS, Anchor
from springtide.training.optim import local_gradients, square_norm
from springtide.training.seeds import seed_generators
from springtide.training.step_metrics import StepMetrics

_LIMBS = 4
_LIMB_BITS = 16
_PER_NAT = 2.0**24


class StepSignals(NamedTuple):
    """What a rank reports to the others in a step."""

    interrupts: frozenset[Interrupt] = frozenset()
    saving: bool = False
    """A save is under way here."""
    save_failed: bool = False
    """A save has failed here since the last step."""
    keeping: bool = False
    """A snapshot in memory is under way here."""
    turned_off: bool = False
    """No more snapshots can be kept here, and the other ranks do not know it yet."""
    snapshot: bool = False
    """Rank 0: a snapshot is due after this step."""
    examine: bool = False
    """Rank 0: devices are to be measured after this step."""
    data_wait_s: float = 0.0
    """How long this rank waited for its batch [s]."""
    speed: float = 0.0
    """Speed of this rank's device, if measured since the last step, else 0 [FLOP/s]."""
    recheck: bool = False
    """Rank 0: the first micro-batches of the next step are to be computed again."""
    pause: bool = False
    """Rank 0: the machine may not train after this step."""
    asked: Callable[[], Interrupt | None] = lambda: None
    """Called just before the ranks agree: what this rank is asked for, so that all know it after this very step. Does not
    wait."""
    joules: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    """Called when all else of the step's message is known: what this rank has used since, and that between steps [J]."""


_NOTHING = StepSignals()
_NO_FIGURES: dict[str, float] = {}
_NO_COLUMNS: Columns = {}
_NO_SEEDS: Mapping[int, int] = {}


class StepResult(NamedTuple):
    """Result of a step, the same on every rank."""

    loss: float
    """Nats per token; of an objective, its sum over its weight."""
    grad_norm: float
    tokens: int
    digest: int
    """64 bits over the sample ids of all ranks."""
    interrupts: frozenset[Interrupt]
    saving: bool
    """Whether any rank is saving; the next four fields likewise."""
    save_failed: bool
    keeping: bool
    snapshot: bool
    examine: bool
    data_waits_s: tuple[float, ...]
    """How long each rank waited for its batch [s]."""
    speeds: tuple[float, ...]
    """Speed of each rank's device, as in ``StepSignals`` [FLOP/s]."""
    updated: bool = True
    """Whether the weights have changed."""
    turned_off: bool = False
    """Whether some rank can keep no more snapshots, and the others did not know it yet."""
    recheck: bool = False
    pause: bool = False
    energy_j: float = 0.0
    """What all ranks used, as in ``events.StepDone``; the next field likewise [J]."""
    energy_between_j: float = 0.0
    extra: dict[str, float] = _NO_FIGURES
    """Figures that are told only in some runs (``events.metrics.EXTRA_METRICS``)."""
    sources: tuple[tuple[float | None, int], ...] = ()
    """Nats per token, None if that is not known, and tokens of each source, if asked for."""


class MicroBatch(NamedTuple):
    """All that the result of a micro-batch depends on, the weights and random numbers aside."""

    rows: Tensor
    """int64 (B, L + 1), negative where they are not predicted (``shards.signed``)."""
    loss_weight: float
    """Gradients are of the loss times this."""
    z_weight: float
    padded_rows: int
    objective: Objective | None = None
    largest: LargestLogit | None = None
    columns: Columns = _NO_COLUMNS
    """Labels of the rows, (B, ...) each, for the objective."""


Compute = Callable[[nn.Module, MicroBatch, World], Tensor]
"""Runs forward and backward of a micro-batch; returns the cross-entropy of each row, as ``row_losses``; or the sums of its
objective, (size,), of which the first is minimised."""


def compute(model: nn.Module, one: MicroBatch, world: World) -> Tensor:
    """Run forward and backward of a micro-batch: a ``Compute``."""
    total, sums = loss_of(model, one)
    (total * one.loss_weight).backward()
    return sums


def loss_of(model: nn.Module, one: MicroBatch) -> tuple[Tensor, Tensor]:
    """Run forward of a micro-batch. Returns what is minimised, summed, and what ``compute`` returns."""
    if one.objective is None:
        return row_losses(model, one.rows, one.z_weight, one.padded_rows, one.largest)
    tokens_BL, targets_BL = _padded(one.rows, one.padded_rows)
    outputs_BLV, B = _checked(model(tokens_BL), targets_BL), len(one.rows)
    if one.largest is not None:
        one.largest.see(outputs_BLV.detach().flatten(0, 1), targets_BL.flatten() != IGNORE_INDEX)
    # without the rows that fill it up: an objective may count rows
    return one.objective(outputs_BLV[:B] if B else outputs_BLV, tokens_BL[:B], targets_BL[:B], one.columns)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens_NL: Tensor,
    digest: int,
    world: World,
    *,
    micro_batches: Sequence[slice],
    padded_rows: int = 0,
    tokens_per_step: int,
    clip_norm: float,
    z_weight: float = 0.0,
    objective: Objective | None = None,
    anchor: Anchor | None = None,
    metrics: StepMetrics | None = None,
    loss_scale: float = 1.0,
    signals: StepSignals = _NOTHING,
    allows_update: Callable[[float, float], bool] = lambda loss, grad_norm: math.isfinite(grad_norm),
    before_update: Callable[[], None] = lambda: None,
    compute_first: Compute = compute,
    sources_N: Tensor | None = None,
    num_sources: int = 0,
    columns: Columns = _NO_COLUMNS,
    seeds: Mapping[int, int] = _NO_SEEDS,
    name: str = "a step",
) -> StepResult:
    """Run one step: forward, backward, agree, clip, update.

    ``tokens_NL`` is this rank's part of the global batch, int64 (n, L + 1), negative where they are not predicted
    (``shards.signed``), on its device; ``micro_batches`` are slices of its
    rows, the same number on every rank, each padded to ``padded_rows``; ``digest`` is that of its sample ids.
    ``allows_update`` gets the step's loss and gradient norm, the same on every rank, and returns whether the weights are to
    change. ``before_update`` is called before they may: it waits for copies of them. ``compute_first`` computes the first
    micro-batch. ``objective`` is minimised in place of the cross-entropy, and its gradient is divided by its weight in the
    whole step; the penalty of ``anchor`` is added to either. ``metrics`` are told with the result. ``sources_N``: number of the
    source of each row, int64 (n,), if figures are wanted by source. ``columns``: labels of the rows, (n, ...) each, for the
    objective. ``seeds``: as from ``lane_seeds``. ``name`` of the step, for errors. Raises TrainingFailed, on all ranks, if
    no token is predicted, or the weight of the objective is not above 0.
    """
    # divided by the tokens of a full step, known in advance; the true count corrects it below
    weight = loss_scale / tokens_per_step
    how = z_weight, padded_rows, compute_first, objective, metrics, columns, seeds
    found, tokens_N = accumulate(model, tokens_NL, world, micro_batches, weight, *how)
    gradients, num_tokens = local_gradients(model), tokens_N.sum()
    # an objective adds its weight and its parts, and tells no loss of a row
    loss_sum, *more = found if objective else (found.sum(),)
    others = 3 + len(more)
    more += anchor.sums(world.is_first_copy) if anchor else ()
    more += metrics.sums(num_tokens) if metrics else ()
    square = square_norm(gradients).to(world.device)
    if not world.is_first_copy:
        square = torch.zeros_like(square)
    by_source = tokens_N.new_zeros(2, num_sources)
    if sources_N is not None:
        nats_N = torch.full_like(tokens_N, math.nan) if objective else found
        by_source.index_add_(1, sources_N, torch.stack([nats_N, tokens_N]))
    sums, agreed = _agree([loss_sum, num_tokens, square, *more], by_source, digest, signals, world)
    weighed = objective.checked_weight(sums) if objective else agreed.tokens
    if not weighed:
        raise TrainingFailed(
            f"no token of {name} is predicted: all of its rows are masked, or left out by stream.skip_samples; add it to "
            "stream.skip"
        )
    extra = objective.told(sums) if objective else {}
    extra |= metrics.told(sums, agreed.grad_norm**2, agreed.tokens, weight) if metrics else {}
    correction = tokens_per_step / weighed / loss_scale
    grad_norm, loss = agreed.grad_norm * correction, sums[0] / weighed
    if anchor:
        grad_norm, penalty = anchor.told(sums[others : others + NUM_SUMS], grad_norm, correction)
        extra |= penalty
    clip = min(1.0, clip_norm / (grad_norm + 1e-6)) if clip_norm else 1.0
    if clip * correction != 1.0:
        torch._foreach_mul_(gradients, clip * correction)
    if anchor:
        anchor.add(clip)
    before_update()
    if updated := allows_update(loss, grad_norm):
        optimizer.step()
    weights_changed(model)
    optimizer.zero_grad(set_to_none=True)
    return agreed._replace(loss=loss, grad_norm=grad_norm, updated=updated, extra=extra)


def accumulate(
    model: nn.Module,
    tokens_NL: Tensor,
    world: World,
    micro_batches: Sequence[slice],
    loss_weight: float,
    z_weight: float,
    padded_rows: int = 0,
    compute_first: Compute = compute,
    objective: Objective | None = None,
    metrics: StepMetrics | None = None,
    columns: Columns = _NO_COLUMNS,
    seeds: Mapping[int, int] = _NO_SEEDS,
) -> tuple[Tensor, Tensor]:
    """Run forward and backward; gradients are of the loss times ``loss_weight``. Returns the cross-entropy [nats] and the
    tokens of each row, float64 (n,); in place of the former all sums of an ``objective``, (size,)."""
    num_rows = len(tokens_NL)
    found = torch.zeros(objective.size if objective else num_rows, dtype=torch.float64, device=world.device)
    tokens_N = torch.zeros(num_rows, dtype=torch.float64, device=world.device)
    if metrics:
        metrics.begin()
    for index, rows in enumerate(micro_batches):
        set_gradient_sync(model, index == len(micro_batches) - 1)
        if rows.start != rows.stop and rows.start in seeds:
            seed_generators(seeds[rows.start])
        largest = metrics.largest if metrics else None
        here = {name: column[rows] for name, column in columns.items()}
        one = MicroBatch(tokens_NL[rows], loss_weight, z_weight, padded_rows, objective, largest, here)
        sums = (compute if index else compute_first)(model, one, world)
        if objective:
            found += sums
        else:
            found[rows] = sums.double()
        tokens_N[rows] = loss_mask(one.rows).sum(dim=1).double()
        if metrics:
            metrics.after_micro_batch(index, tokens_N[rows].sum())
    return found, tokens_N


def row_losses(
    model: nn.Module,
    rows_BL: Tensor,
    z_weight: float = 0.0,
    padded_rows: int = 0,
    largest: LargestLogit | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss, summed over the tokens of ``rows_BL`` (B, L + 1), fp32 scalar, and the cross-entropy in it of each row,
    float64 (B,), without gradient; see ``head_loss``. Rows that do not count fill it up to ``padded_rows``, the one shape that
    a compiled model is called with; a rank without rows still runs the model, on one such row, because the others'
    collectives wait for it. Raises TrainingFailed if a model does not return logits (B, L, V)."""
    tokens_BL, targets_BL = _padded(rows_BL, padded_rows)
    if getattr(model, "computes_loss", False):
        seen = {} if largest is None else {"largest": largest}
        total, nats_N = model(tokens_BL, targets_BL, z_weight, **seen)
    else:
        total, nats_N = _of_logits(model(tokens_BL), targets_BL, z_weight, largest)
    nats_B = nats_N.view_as(targets_BL)[: len(rows_BL)].sum(dim=1, dtype=torch.float64)
    # multiples of 2**-24: their sums are exact below 2**29, so they do not depend on which rank has which row
    return total, torch.round(nats_B * _PER_NAT) / _PER_NAT


@torch.no_grad()
def row_nats(model: nn.Module, rows_BL: Tensor, padded_rows: int = 0) -> Tensor:
    """Return the cross-entropy of each of ``rows_BL`` (B, L + 1), summed over its tokens, float64 (B,); rows that do not count
    are added as in ``row_losses``. Raises as that does."""
    tokens_BL, targets_BL = _padded(rows_BL, padded_rows)
    if getattr(model, "computes_loss", False):
        nats_BL = model(tokens_BL, targets_BL, by_token=True)
    else:
        logits_NV, wanted_N = _logits(model(tokens_BL), targets_BL), targets_BL.flatten()
        nats_N = F.cross_entropy(logits_NV, wanted_N, ignore_index=IGNORE_INDEX, reduction="none")
        nats_BL = nats_N.view_as(targets_BL)
    return nats_BL[: len(rows_BL)].double().sum(dim=1)


def _padded(rows_BL: Tensor, padded_rows: int) -> tuple[Tensor, Tensor]:
    """Return ids and targets, int64 (B, L) each, of rows and of as many that do not count as are missing."""
    B, num_missing = len(rows_BL), max(1, padded_rows) - len(rows_BL)
    if num_missing > 0:
        rows_BL = F.pad(rows_BL, (0, 0, 0, num_missing))
    tokens_BL = rows_BL[:, :-1]
    tokens_BL = torch.where(tokens_BL < 0, ~tokens_BL, tokens_BL)
    targets_BL = rows_BL[:, 1:].masked_fill(~loss_mask(rows_BL), IGNORE_INDEX)
    if num_missing > 0:
        targets_BL[B:] = IGNORE_INDEX
    return tokens_BL, targets_BL


def _of_logits(
    logits_BLV: Any, targets_BL: Tensor, z_weight: float, largest: LargestLogit | None
) -> tuple[Tensor, Tensor]:
    logits_NV, wanted_N = _logits(logits_BLV, targets_BL), targets_BL.flatten()
    if largest is not None:
        largest.see(logits_NV.detach(), wanted_N != IGNORE_INDEX)
    nats_N = F.cross_entropy(logits_NV, wanted_N, ignore_index=IGNORE_INDEX, reduction="none")
    extra = (logits_NV.logsumexp(-1).square() * (wanted_N != IGNORE_INDEX)).sum() if z_weight else 0.0
    return nats_N.sum() + z_weight * extra, nats_N.detach()


def _logits(logits_BLV: Any, targets_BL: Tensor) -> Tensor:
    """Return the logits as fp32 (N, V). Raises as ``_checked``."""
    return _checked(logits_BLV, targets_BL).flatten(0, 1).float()


def _checked(logits_BLV: Any, targets_BL: Tensor) -> Tensor:
    """Return what a model returned; raises TrainingFailed if it is not logits (B, L, V)."""
    if not isinstance(logits_BLV, Tensor) or logits_BLV.dim() != 3 or logits_BLV.shape[:2] != targets_BL.shape:
        B, L = targets_BL.shape
        found = tuple(logits_BLV.shape) if isinstance(logits_BLV, Tensor) else f"a {type(logits_BLV).__name__}"
        raise TrainingFailed(f"the model returned {found} for ids ({B}, {L}); return logits ({B}, {L}, ids)")
    return logits_BLV


def loss_mask(rows_BL: Tensor) -> Tensor:
    """Return which tokens of rows (B, L + 1), without the first, count in the loss, bool (B, L)."""
    return rows_BL[:, 1:] >= 0


def _agree(
    sums: Sequence[Tensor], by_source: Tensor, digest: int, signals: StepSignals, world: World
) -> tuple[list[float], StepResult]:
    """Sum over all ranks; return the sums and the step's result, whose loss and gradient norm are not divided yet. ``sums``:
    loss, tokens and squared gradient norm of this rank, and what an objective and metrics add, float64 scalars; ``by_source``:
    loss, NaN if it is not known, and tokens of each source, (2, sources). Raises CollectiveError if the sums over all ranks are
    garbage, before they are used."""
    # a float64 sum is exact below 2**53, so the 64-bit digest travels as four limbs of 16 bits
    limbs = [(digest >> (_LIMB_BITS * limb)) & (2**_LIMB_BITS - 1) for limb in range(_LIMBS)]
    interrupts = signals.interrupts | {signals.asked()}
    asked = [kind in interrupts for kind in Interrupt]
    flags = [
        *asked,
        signals.saving,
        signals.save_failed,
        signals.keeping,
        signals.turned_off,
        signals.snapshot,
        signals.examine,
        signals.recheck,
        signals.pause,
    ]
    mine = [[0.0] * world.size, [0.0] * world.size]
    mine[0][world.rank], mine[1][world.rank] = signals.data_wait_s, signals.speed
    figures = [*limbs, *flags, *mine[0], *mine[1], *signals.joules()]
    here = torch.stack([one.to(world.device) for one in sums])  # a penalty of weights on the host is there, too
    message = torch.cat([here, by_source.flatten(), torch.tensor(figures, dtype=torch.float64, device=world.device)])
    found = sum_over_ranks(message, world)
    (loss, tokens, square_sum), rest = found[:3], found[len(sums) :]
    num_sources = by_source.shape[1]
    source_nats, source_tokens, rest = rest[:num_sources], rest[num_sources : 2 * num_sources], rest[2 * num_sources :]
    rest, (energy_j, energy_between_j) = rest[:-2], rest[-2:]
    limbs, by_rank = rest[:_LIMBS], rest[-2 * world.size :]
    said = map(bool, rest[_LIMBS : -2 * world.size])
    *asked, saving, save_failed, keeping, turned_off, snapshot, examine, recheck, pause = said
    result = StepResult(
        loss=loss,
        grad_norm=square_sum**0.5,
        tokens=int(tokens),
        digest=sum(int(limb) << (_LIMB_BITS * place) for place, limb in enumerate(limbs)) % 2**64,
        interrupts=frozenset(kind for kind, is_asked in zip(Interrupt, asked, strict=True) if is_asked),
        saving=saving,
        save_failed=save_failed,
        keeping=keeping,
        turned_off=turned_off,
        snapshot=snapshot,
        examine=examine,
        recheck=recheck,
        pause=pause,
        energy_j=energy_j,
        energy_between_j=energy_between_j,
        data_waits_s=tuple(by_rank[: world.size]),
        speeds=tuple(by_rank[world.size :]),
        sources=tuple(
            (nats / count if count and not math.isnan(nats) else None, int(count))
            for nats, count in zip(source_nats, source_tokens, strict=True)
        ),
    )
    return found[: len(sums)], result
