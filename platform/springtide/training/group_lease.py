"""Leases (rights to write a run) of a worker group: claim the run, and roll it back. Only rank 0 calls the methods of a lease.

A rollback skips the step of a loss spike and the steps that may have led to it, and resumes from a checkpoint before them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import secrets
from collections.abc import Mapping

from springtide import config as configs
from springtide.checkpoint import branch, leases
from springtide.checkpoint.agreed import abandon_after
from springtide.checkpoint.format import Identity
from springtide.checkpoint.fresh_start import begin_from_scratch, check_order
from springtide.config import Config
from springtide.config.steps import OrderStep, StepsDone
from springtide.distributed import on_first
from springtide.errors import TrainingFailed, UnfitNode
from springtide.events import RolledBack
from springtide.faults import fault_point
from springtide.storage import Folder
from springtide.stream import Data


@dataclasses.dataclass
class GroupLease:
    """The lease (the right to write the run) of a worker group. Each claim and each rollback replaces it by a new lease."""

    run: Folder
    owner: str
    """Id of the driver that has claimed the run. Empty without a driver: the group claims the run itself."""
    node: str
    """Node of this rank; empty if unknown."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name of a setting -> the user's own code that the setting names (``Config.needs_trust``). A claim without a driver
    records this code as trusted."""
    term: int = 0
    """Number (term) of the lease that the group holds now; the same on every rank."""

    def claim(self, ends: int = 0) -> int:
        """Claim the run and return the number (term) of the new lease. ``ends``: term of the lease that the group has held
        until now; 0 if none. Raises RunExists if another owner holds the run, UnfitNode if this node cannot read the claim that
        the driver has written."""
        again, self.owner = bool(self.owner), self.owner or secrets.token_hex(8)
        fault_point("claim", "before")
        try:
            term = leases.claim(self.run, self.owner, again=again, ends=ends, sources=self.sources).term
        except FileNotFoundError as error:
            raise UnfitNode(str(error), self.node) from None
        fault_point("claim", "after")
        return term

    def go_back_to(self, ended: int, step: StepsDone, reason: str) -> int:
        """Claim the run again, end the lease with the number ``ended``, and abandon every checkpoint and snapshot after
        ``step``. Returns the number (term) of the new lease. If this abandons the last checkpoint, the run restarts at step 0
        only if the user passes --from-scratch (``checkpoint/fresh_start.py``)."""
        mine = self.claim(ends=ended)  # before any change: the claim fails if another group has taken over the run
        leases.end(self.run, ended)
        # from now on, no snapshot after ``step`` is restored. Write this before checkpoints are marked as abandoned, so that a
        # crash in between leaves no snapshot to restore
        leases.note_gone_back(self.run, mine, step)
        abandon_after(self.run, step, reason, mine)
        return mine

    def go_back(self, ended: int, config: Config, identity: Identity, skip: tuple[int, ...]) -> int:
        """Claim the run again, end the lease with the number ``ended``, and abandon the checkpoints that were trained on any
        step of ``skip``, indexes of steps in the data order. ``skip`` is written to the run's config, so that every later
        worker group skips these steps. Returns the number (term) of the new lease."""
        mine = self.claim(ended)  # before any change: the claim fails if another group has taken over the run
        # from now on, no earlier snapshot is restored: a faulty device may have corrupted it
        leases.note_rollback(self.run, mine)
        leases.end(self.run, ended)
        if not check_order(self.run, identity, go_back=True, term=mine):
            begin_from_scratch(self.run, mine)  # no usable checkpoint: all were trained on skipped steps
        # change the saved config, not this group's own config, which may have a smaller micro-batch
        known = self.run.exists(configs.RUN_CONFIG)
        saved = (
            configs.parse(self.run.read(configs.RUN_CONFIG), self.run.where(configs.RUN_CONFIG)) if known else config
        )
        changed = saved.override({"stream.skip": skip})
        self.run.write(configs.RUN_CONFIG, configs.dump(changed), private=bool(configs.secret_fields(changed)))
        return mine


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
