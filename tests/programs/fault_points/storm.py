"""Random faults over one run, some of them at fault points: while no group trains."""

from __future__ import annotations

import dataclasses
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import Any, get_args

from fault_points.cluster import FaultCluster
from fault_points.watch import Reached, name_of, watch
from springtide.api.drill import DrillResult, carry_out
from springtide.faults import POINTS, When
from springtide.planning.scenarios import Act, Scenario, Stage, config_of

_OF_A_RESTART = tuple(
    name_of(point, when) for point in POINTS if point not in ("replicate", "commit") for when in get_args(When)
)
"""Names of the fault points that are passed when a group ends or forms."""
_IN_RESTART = 0.8
"""Share of the faults after a kill or a hang that come in the restart."""
_OVERDUE = 40
"""An act at a fault point that no process reaches is carried out this many steps later [steps]."""
_APART = 120
"""Steps between two pairs of ``stops_of``: enough for the group to grow to all nodes again [steps]."""


@dataclasses.dataclass(frozen=True)
class ActAt(Act):
    """An act that may wait for a fault point."""

    at: str = ""
    """Name of the fault point at which it happens, as ``restore-before``, when ``step`` is done; empty for any moment."""

    def __str__(self) -> str:
        return super().__str__() + (f" at {self.at}" if self.at else "")


def storm_of(seed: int, faults: int) -> Scenario:
    """Return random faults, with joins between them; the cluster never loses its last node. Most faults that follow a kill or a
    hang come at a fault point of the restart which that causes: while no group trains."""
    chance = random.Random(seed)
    nodes, acts, step, left = 3, list[ActAt](), 20, faults
    while left:
        kinds = ["hang", "kill", "drain"] if nodes > 1 else ["hang"]
        what = "add" if nodes == 1 or (nodes < 3 and chance.random() < 0.5) else chance.choice(kinds)
        left -= what != "add"
        nodes += {"add": 1, "kill": -1, "drain": -1, "hang": 0}[what]
        in_restart = what != "add" and acts and acts[-1].what in ("kill", "hang") and chance.random() < _IN_RESTART
        at = chance.choice(_OF_A_RESTART) if in_restart else ""
        acts.append(ActAt(acts[-1].step if at else step, what, at=at))
        step += chance.randrange(1, 30)
    return Scenario(3, tuple(acts), step + 40, f"{faults} faults at random, seed {seed}")


def stops_of(seed: int, faults: int) -> Scenario:
    """Return pairs of faults: a worker is stopped, or its node killed, while the group trains; then a worker is stopped for
    good at a fault point of that restart. The points come in an order of their own for each seed, and as many pairs as there
    are points pass all of them. A killed node is replaced at once."""
    chance = random.Random(seed)
    points = chance.sample(_OF_A_RESTART, len(_OF_A_RESTART))
    acts, step = list[ActAt](), 20
    for number in range(faults // 2):
        first = chance.choice(("kill", "hang"))
        acts.append(ActAt(step, first, workers=3))  # when the last pair is over
        if first == "kill":
            acts.append(ActAt(step, "add"))
        acts.append(ActAt(step, "hang", at=points[number % len(points)]))
        step += _APART
    return Scenario(
        3, tuple(acts), step + 40, f"{faults} faults, half of them stopped workers of restarts, seed {seed}"
    )


class StageAtPoints(Stage):
    """Carries out acts at their steps in the thread that listens to events, and at fault points in another one."""

    def __init__(self, cluster: Any, acts: tuple[Act, ...], notice_file: str, say: Callable[[str], None]) -> None:
        super().__init__(cluster, acts, notice_file, say)
        self._acting = threading.Lock()

    def reach(self, step: int, workers: int) -> None:
        """Carry out the acts that are due when ``workers`` workers have finished ``step``."""
        with self._acting:
            super().reach(step, workers)

    def pass_point(self, reached: Reached) -> None:
        """Carry out the act that is due when a process reaches a fault point, on its node; it waits for that."""
        if not self._waits_for(reached):  # most of what is reached
            return
        with self._acting:
            if self._waits_for(reached) and self.to_come[0].step <= self._step:
                self._say(f"at {reached.name}:")
                node = self._cluster.node_of(reached.pid)
                self._do(self.to_come.pop(0), node if node in self._staying() else "")

    def _waits_for(self, reached: Reached) -> bool:
        return bool(self.to_come) and _point_of(self.to_come[0]) == reached.name

    def _is_due(self, act: Act, step: int, workers: int) -> bool:
        overdue = _OVERDUE * bool(_point_of(act))
        return super()._is_due(act, step - overdue, workers)


def _point_of(act: Act) -> str:
    return act.at if isinstance(act, ActAt) else ""


def storm(
    say: Callable[[str], None], seed: int = 0, faults: int = 20, keep: str = "", stops: bool = False
) -> DrillResult:
    """Train on a local cluster in a storm of faults, and compare with an undisturbed twin. Takes minutes.

    Args:
        say: receives each event as a line of text, as it happens.
        seed: of the storm.
        faults: number of faults.
        keep: folder in which the two runs stay; if empty, they are removed.
        stops: stop a worker for good in each phase of a restart, instead of faults of all kinds.
    """
    scenario, root = (
        (stops_of if stops else storm_of)(seed, faults),
        keep or tempfile.mkdtemp(prefix="springtide-storm-"),
    )
    stages = list[StageAtPoints]()

    def stage_of(*how: Any) -> Stage:
        stages.append(StageAtPoints(*how))
        return stages[0]

    def on_reached(reached: Reached) -> None:
        for stage in stages:
            stage.pass_point(reached)

    try:
        with watch(on_reached):
            return carry_out(scenario, config_of(scenario, root), say, FaultCluster, stage_of)
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)
