"""What a restart costs, and how long before a node's loss its group must be asked to leave."""

from __future__ import annotations

import math
from typing import NamedTuple

STEPS_TO_LEAVE = 2
"""A request that comes before the ranks of a step agree is followed after that step, any other one after the next; until a run
has measured how many it takes."""
_MARGIN = 1.5
_SAVES = 2.5
"""A save may be under way when the last one is to begin: two saves, and a margin."""


class RestartForecast(NamedTuple):
    """Cost of a restart, and how long its gain can last."""

    restart_s: float = 10.0
    left_s: float = math.inf
    """Training time left at the current group size [s]."""
    step_s: float = 0.0
    """Time of a step, after which a group can leave; infinite while none is measured [s]."""
    save_s: float = 0.0
    """Time of a save to the store; 0 while none is measured [s]."""
    copy_s: float = 0.0
    """Time to copy the state to the memory of nodes that stay; 0 while none is measured [s]."""
    leave_steps: int = STEPS_TO_LEAVE
    """Steps that begin or end between a request to leave and the last step before it is followed, the most of late."""

    def copied_by(self, lost_s: float, reserve_s: float, now: float) -> float:
        """Return when the copy of a group that is asked to leave ``now`` must be safe in memory, so that there is still time
        for a save to the store before ``lost_s``; ``lost_s`` itself if there is no time for both, because a save takes
        longer than a copy [s]."""
        by_s = lost_s - max(reserve_s, _MARGIN * self.save_s)
        return by_s if now + self.leave_steps * self.step_s + _MARGIN * self.copy_s <= by_s else lost_s

    def leaving_s(self, reserve_s: float, durable: bool) -> float:
        """Return how long before a node's loss its group must be asked to leave: the steps until it leaves, and the time to
        bring its state to safety. ``durable``: to the store. ``reserve_s`` is the least for the latter [s]. Before a copy is
        measured there is time for a save as well, should it take long."""
        if durable:
            safe_s = max(reserve_s, _SAVES * self.save_s)
        elif self.copy_s:
            safe_s = max(reserve_s, _MARGIN * self.copy_s)
        else:
            safe_s = reserve_s + _MARGIN * self.save_s
        return self.leave_steps * self.step_s + safe_s
