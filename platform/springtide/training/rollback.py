"""A rollback: the step of a spike, and those that may have led to it, are skipped, and the run goes back to before them."""

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
    """Return ``data`` without the suspect steps, and the event of the rollback.

    Suspect are the step of the spike, which is the last of ``step`` steps done, and the ``optim.rollback_steps`` before it.
    Raises TrainingFailed if that skips too many steps in a row.
    """
    optim, order = config.optim, data.order
    here = step - branch.first_step(config.train)  # a branch keeps the steps of its trunk
    suspects = min(here, optim.rollback_steps + 1)  # the last one is the spike's step
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
    """Make every later worker group skip the steps that ``data`` skips; all ranks together. The run's config says so."""
    order = data.order
    call = functools.partial(lease.go_back, lease.term, config, order.identity_at, order.skip)
    lease.term = on_first(call)
