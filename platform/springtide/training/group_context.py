"""Where a worker group runs, who watches it there, and what compiled code it has."""

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
    """Where a worker group runs, and who watches it there."""

    owner: str = ""
    """Owner id of the driver that has claimed the run; empty if there is no driver: the worker group claims the run itself."""
    nodes: Sequence[str] = ()
    """Node of each rank, if known."""
    markets: Sequence[str] = ()
    """Market of each rank's node, if known."""
    read_elsewhere: ReadElsewhere | None = None
    """Reads a file that this group's nodes found bad on another node; None: there is none."""
    heartbeat: Callable[[], None] = lambda: None
    """Called again and again while a save or an evaluation lasts: the group is alive, although it makes no step."""
    time_to_leave_s: Callable[[], float] = lambda: math.inf
    """Called on rank 0 of a group that was asked to leave: returns how long its copy in memory may take [s]."""
    compiled: CompileCache | None = None
    """The run's compiled code; None keeps none."""
