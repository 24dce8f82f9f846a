"""One optimizer step: forward and backward, one all-reduce to agree, clip, update.

The loss is a sum over tokens divided by the number of valid tokens of the whole step, and gradients are summed over ranks:
neither the world size nor the micro-batch size appears in the maths. Everything that the ranks must agree on travels in one
all-reduce, the step's message. All other features of a step are parts (``part.py``), which the step does not know by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from springtide.distributed import World
from springtide.distributed.fsdp import set_gradient_sync, weights_changed
from springtide.errors import TrainingFailed
from springtide.optim.build import local_gradients, square_norm
from springtide.stream import digest
from springtide.training.losses import Compute, LossOptions, MicroBatch, compute, loss_mask
from springtide.training.message import FieldsOfGroup, StepMessage
from springtide.training.part import Part, Share, StepResult, Work
from springtide.training.seeds import seed_generators


@dataclasses.dataclass
class StepSetup:
    """Model, optimizer and options that all steps of a worker group share."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    world: World
    loss: LossOptions = dataclasses.field(default_factory=LossOptions)
    clip_norm: float = 0.0
    """Largest gradient norm; 0 turns clipping off."""
    loss_scale: Callable[[], float] = lambda: 1.0
    """Returns the factor by which the loss is scaled before backward, so that small fp16 gradients do not underflow."""
    parts: Sequence[Part] = ()
    fields: FieldsOfGroup = dataclasses.field(default_factory=FieldsOfGroup)


def train_step(setup: StepSetup, work: Work) -> StepResult:
    """Run one step; all ranks call it together.

    Raises:
        TrainingFailed: on all ranks, if no token is predicted, or the total weight of the objective is not above 0.
        PartFailed: on all ranks, if the parts of two ranks add different fields to the step's message.
        Exception: on the rank whose part (feature of the step) raised it; other ranks raise as ``StepMessage.exchange`` says.
        CollectiveError: the all-reduce returned garbage, because a rank is lost; the weights have not changed.
    """
    world, parts = setup.world, setup.parts
    for part in parts:
        part.before_step(work)

    # forward and backward. The true token count of the step is not known yet: divide the loss by the count of a full step.
    # ``correction`` below makes up for the difference
    scale = setup.loss_scale()
    share = accumulate(setup, work, scale / work.tokens_per_step)

    # agree: exchange the step's message, in one all-reduce. This is the step's only wait for the device
    message = StepMessage(world)
    message.sum("loss", share.sums)
    message.sum("tokens", share.row_tokens.sum())
    square = square_norm(share.gradients).to(world.device)
    message.sum("square", square if world.is_first_copy else torch.zeros_like(square))
    message.digest("samples", digest(work.sample_ids))
    for part in parts:
        message.collect(type(part).__name__, lambda part=part: part.contribute(message, share))  # type: ignore[misc]
    agreed = message.exchange(setup.fields)

    tokens = agreed["tokens"]
    weight = setup.loss.weight(agreed["loss"], tokens)
    if not weight:
        raise TrainingFailed(
            f"no token of {work.name} is predicted: all of its rows are masked, or left out by stream.skip_samples; add it "
            "to stream.skip"
        )
    correction = work.tokens_per_step / weight / scale
    result = StepResult(
        loss=agreed["loss"][0] / weight,
        grad_norm=agreed["square"] ** 0.5 * correction,
        tokens=int(tokens),
        digest=agreed["samples"],
        agreed=agreed,
        correction=correction,
        extra=setup.loss.metrics(agreed["loss"]),
    )
    for part in parts:
        part.receive(result)

    # clip and update
    clip = min(1.0, setup.clip_norm / (result.grad_norm + 1e-6)) if setup.clip_norm else 1.0
    if clip * correction != 1.0:
        torch._foreach_mul_(share.gradients, clip * correction)
    for part in parts:
        part.add_gradients(clip)
    for part in parts:
        part.before_update()
    allowed = [part.allows_update(result) for part in parts]
    result.updated = math.isfinite(result.grad_norm) and all(allowed)
    if result.updated:
        setup.optimizer.step()
    weights_changed(setup.model)
    setup.optimizer.zero_grad(set_to_none=True)
    return result


def accumulate(setup: StepSetup, work: Work, loss_weight: float) -> Share:
    """Run forward and backward of all micro-batches. The gradients are the gradients of the summed loss times
    ``loss_weight``."""
    device, objective = setup.world.device, setup.loss.objective
    sums = torch.zeros(objective.size if objective else 0, dtype=torch.float64, device=device)
    nats_N = torch.zeros(len(work.rows), dtype=torch.float64, device=device)
    tokens_N = torch.zeros_like(nats_N)
    run: Compute = compute
    for part in setup.parts:
        run = part.wrap_compute(run)
    for index, rows in enumerate(work.micro_batches):
        set_gradient_sync(setup.model, index == len(work.micro_batches) - 1)
        if rows.start != rows.stop and rows.start in work.seeds:
            seed_generators(work.seeds[rows.start])
        columns = {name: column[rows] for name, column in work.columns.items()}
        one = MicroBatch(work.rows[rows], loss_weight, setup.loss, work.padded_rows, columns, index)
        found: Tensor = run(setup.model, one)
        if objective:
            sums += found
        else:
            nats_N[rows] = found.double()
        tokens_N[rows] = loss_mask(one.rows).sum(dim=1).double()
    gradients = local_gradients(setup.model)
    if objective:
        return Share(work, sums, None, tokens_N, gradients, loss_weight)
    return Share(work, nats_N.sum()[None], nats_N, tokens_N, gradients, loss_weight)
