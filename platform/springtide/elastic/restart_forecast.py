"""Forecast what a restart costs, and how long before the loss of a node its group must be asked to leave."""

from __future__ import annotations

import math
from typing import NamedTuple

STEPS_TO_LEAVE = 2
"""A request that comes before the ranks of a step agree is followed after that step, any other one after the next; until a run
has measured how many it takes."""
_SLOW_STEP = 1.2
"""A step may take so much longer than the median one."""
_MARGIN = 1.5
_SAVES = 2.5
"""When the last save should begin, another one may be under way. So there is time for two, and a margin."""


class RestartForecast(NamedTuple):
    """What a restart costs, and how long a larger group can make use of it."""

    restart_s: float = 10.0
    left_s: float = math.inf
    """Training time that the run still needs at the current group size [s]."""
    step_s: float = 0.0
    """Time of a step. A group leaves only between two steps. Infinite until one is measured [s]."""
    save_s: float = 0.0
    """Time of a save to the store; 0 until one is measured [s]."""
    copy_s: float = 0.0
    """Time to copy the state into the memory of nodes that stay; 0 until one is measured [s]."""
    leave_steps: int = STEPS_TO_LEAVE
    """Steps from a request to leave until the group leaves, both ends counted: the most of the recent requests."""

    def copied_by(self, lost_s: float, reserve_s: float, now: float) -> float:
        """Return by when a copy in memory must be complete. If it is late, the group saves to the store instead, and that save
        must end before the node is lost. If there is no time for a copy and then a save, the answer is ``lost_s``.

        Args:
            lost_s: when the node is lost [s].
            reserve_s: least time to leave for the save [s].
            now: when the group is asked to leave [s].

        Examples:
            >>> forecast = RestartForecast(step_s=2.0, save_s=20.0, copy_s=1.0)
            >>> forecast.copied_by(120.0, 5.0, now=60.0), forecast.copied_by(120.0, 5.0, now=90.0)
            (90.0, 120.0)
        """
        by_s = lost_s - max(reserve_s, _MARGIN * self.save_s)
        return by_s if now + self.leave_steps * self.step_s + _MARGIN * self.copy_s <= by_s else lost_s

    def leaving_s(self, reserve_s: float, durable: bool) -> float:
        """Return how long before the loss of a node its group must be asked to leave: the steps until it leaves, and the time
        to bring its state to safety [s]. Until a copy has been measured, a save must fit as well, in case the copy is slow.

        Args:
            reserve_s: least time to bring the state to safety [s].
            durable: whether the state goes to the store; else to the memory of other nodes.

        Examples:
            >>> forecast = RestartForecast(step_s=2.0, save_s=20.0, copy_s=1.0)
            >>> forecast.leaving_s(5.0, durable=False), forecast.leaving_s(5.0, durable=True)
            (9.8, 54.8)
        """
        if durable:
            safe_s = max(reserve_s, _SAVES * self.save_s)
        elif self.copy_s:
            safe_s = max(reserve_s, _MARGIN * self.copy_s)
        else:
            safe_s = reserve_s + _MARGIN * self.save_s
        return self.leave_steps * _SLOW_STEP * self.step_s + safe_s
