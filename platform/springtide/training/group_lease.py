"""What a worker group does in the folder of the run that it holds: claim the run, and roll it back. Rank 0 alone."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.agreed import abandon_after
from springtide.checkpoint.format import Identity
from springtide.checkpoint.fresh_start import begin_from_scratch, check_order
from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.errors import UnfitNode
from springtide.faults import fault_point
from springtide.storage import Folder


@dataclasses.dataclass
class GroupLease:
    """A worker group's leases on its run, one after the other."""

    run: Folder
    owner: str
    """Owner id of the driver that has claimed the run; empty if there is no driver: the group claims the run itself."""
    node: str
    """Node of this rank; empty if unknown."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The user's own code, which a group without a driver trusts (``Config.needs_trust``)."""
    term: int = 0
    """Term of the lease that the group holds now; every rank knows it."""

    def claim(self, ends: int = 0) -> int:
        """Claim the run and return the group's term; ``ends``: the one that it has held until now. Raises RunExists if another
        owner holds the run, UnfitNode if this node does not see the driver's claim."""
        again, self.owner = bool(self.owner), self.owner or secrets.token_hex(8)
        fault_point("claim", "before")
        try:
            term = leases.claim(self.run, self.owner, again=again, ends=ends, sources=self.sources).term
        except FileNotFoundError as error:
            raise UnfitNode(str(error), self.node) from None
        fault_point("claim", "after")
        return term

    def go_back_to(self, ended: int, step: StepsDone, reason: str) -> int:
        """Claim the run again, end lease ``ended``, and abandon every checkpoint and snapshot after ``step``. If no checkpoint
        is left, the run does not begin again by itself: ``checkpoint/fresh_start.py``. Returns the new term."""
        mine = self.claim(ends=ended)  # first: a group that was fenced off must write nothing
        leases.end(self.run, ended)
        leases.note_gone_back(self.run, mine, step)  # before marks: a snapshot must not count any more
        abandon_after(self.run, step, reason, mine)
        return mine

    def go_back(self, ended: int, config: Config, identity: Identity, skip: tuple[int, ...]) -> int:
        """Claim the run again, end lease ``ended``, and set aside the checkpoints whose steps are skipped from now on;
        ``skip`` in the run's config makes every later worker group skip them. Returns the new term."""
        mine = self.claim(ended)  # first: a group that was fenced off must write nothing
        leases.note_rollback(self.run, mine)  # a device may have spoilt what is in memory
        leases.end(self.run, ended)
        if not check_order(self.run, identity, go_back=True, term=mine):
            begin_from_scratch(self.run, mine)  # all checkpoints contain skipped steps
        known = self.run.exists(configs.RUN_CONFIG)  # this group's config may have a smaller micro-batch
        saved = (
            configs.parse(self.run.read(configs.RUN_CONFIG), self.run.where(configs.RUN_CONFIG)) if known else config
        )
        changed = saved.override({"stream.skip": skip})
        self.run.write(configs.RUN_CONFIG, configs.dump(changed), private=bool(configs.secret_fields(changed)))
        return mine
