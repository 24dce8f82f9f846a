"""Rollback: skip the step of a spike and the steps that may have led to it, and resume from a checkpoint before them."""

from __future__ import annotations

import functools
import itertools

from springtide.checkpoint import branch
from springtide.config import Config
from springtide.config.steps import OrderStep, StepsDone
from springtide.distributed import on_first
from springtide.errors import TrainingFailed
from springtide.events import RolledBack
from springtide.stream import Data
from springtide.training.group_lease import GroupLease


def without_suspects(config: Config, data: Data, step: StepsDone) -> tuple[Data, RolledBack]:
    """Return ``data`` without the suspect steps, and the event ``RolledBack``.

    The suspect steps are the step of the spike, which is the last of the ``step`` steps done, and the ``optim.rollback_steps``
    steps before it. Raises TrainingFailed if too many steps in a row would be skipped.
    """
    optim, order = config.optim, data.order
    here = step - branch.first_step(config.train)  # a branch skips no steps of the run that it continues
    suspects = min(here, optim.rollback_steps + 1)  # + 1 for the step of the spike
    skipped: list[OrderStep] = [order.step_after(StepsDone(before)) for before in range(step - suspects, step)]
    data = data.skipping(skipped)
    in_a_row = next(count for count in itertools.count() if skipped[-1] - count not in data.order.skip)
    if in_a_row > optim.max_left_out + optim.rollback_steps:
        raise TrainingFailed(
            f"{in_a_row} steps of the order in a row, to {skipped[-1]}, are skipped because of spikes: look at their "
            "rows (springtide inspect), lower optim.peak_lr, or raise optim.spike_deviations"
        )
    return data, RolledBack(step=step, skipped=skipped, reason=f"for the spike at step {step}")


def go_back(config: Config, data: Data, lease: GroupLease) -> None:
    """Write the steps that ``data`` skips to the run's config, so that every later worker group skips them. Claim a new lease,
    the right to write the run (``GroupLease.go_back``). All ranks call it together."""
    order = data.order
    call = functools.partial(lease.go_back, lease.term, config, order.identity_at, order.skip)
    lease.term = on_first(call)
