"""The environment of a worker group: its nodes, the callbacks of its driver, and the cache of compiled code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from springtide.checkpoint.second_reader import ReadElsewhere

if TYPE_CHECKING:
    from springtide.training.compile_cache import CompileCache


@dataclasses.dataclass(frozen=True)
class GroupContext:
    """Nodes of a worker group, callbacks of its driver, and its cache of compiled code."""

    owner: str = ""
    """Id of the driver that has claimed the run. Only this driver and its worker groups may write the run. Empty without a
    driver: the worker group claims the run itself."""
    nodes: Sequence[str] = ()
    """Node of each rank; empty if unknown."""
    markets: Sequence[str] = ()
    """How each rank's node is bought, such as spot; empty if unknown."""
    read_elsewhere: ReadElsewhere | None = None
    """Reads a file again on a node other than those that found the file damaged. None if there is no such node."""
    heartbeat: Callable[[], None] = lambda: None
    """Called repeatedly during a save or an evaluation, to report that the group is alive although it makes no steps."""
    time_to_leave_s: Callable[[], float] = lambda: math.inf
    """Called on rank 0 of a group that received a request to leave. Returns how long its in-memory snapshot may take [s]."""
    compiled: CompileCache | None = None
    """Cache of the run's compiled code; None keeps no compiled code."""
