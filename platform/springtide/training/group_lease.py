"""What a group of workers does to a run's folder because it holds the run: claim it, and go back in it. Rank 0 alone."""

from __future__ import annotations

import dataclasses
import secrets

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.format import Identity, check_order
from springtide.checkpoint.fresh_start import begin_from_scratch
from springtide.config import Config
from springtide.errors import UnfitNode
from springtide.store import Folder


@dataclasses.dataclass
class GroupLease:
    """A group's claims on its run, one after the other."""

    run: Folder
    owner: str
    """Of the driver, which has claimed the run; empty where there is none, and the group claims it for itself."""
    node: str
    """Where this rank is; empty where that is not known."""

    def claim(self) -> int:
        """The group's number; the run is theirs from now on. RunExists when another holds it, UnfitNode when this node does not
        see the driver's claim."""
        again, self.owner = bool(self.owner), self.owner or secrets.token_hex(8)
        try:
            return leases.claim(self.run, self.owner, again=again).term
        except FileNotFoundError as error:
            raise UnfitNode(str(error), self.node) from None

    def go_back(self, ended: int, config: Config, identity: Identity, skip: tuple[int, ...]) -> int:
        """Claim the run anew, end claim ``ended``, and set aside the checkpoints whose steps are jumped over from now on;
        ``skip`` in the run's config says so to every later group. Returns the new number."""
        mine = self.claim()  # first: whoever was fenced off writes nothing
        leases.end(self.run, ended)
        if not check_order(self.run, identity, go_back=True, term=mine):
            begin_from_scratch(self.run, mine)  # every checkpoint is of such steps
        known = self.run.exists(configs.RUN_CONFIG)  # this group's may have a smaller micro-batch
        saved = configs.parse(self.run.read(configs.RUN_CONFIG)) if known else config
        changed = saved.override({"stream.skip": skip})
        self.run.write(configs.RUN_CONFIG, configs.dump(changed), private=bool(configs.secret_fields(changed)))
        return mine
