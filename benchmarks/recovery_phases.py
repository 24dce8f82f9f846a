"""Where the gap of a restart goes, by phase, from the journal of a run of ours; and how any client's gap is measured.

    last step ends | under way | detection | let-go | rendezvous | restore | first step | usual step

under way    until the event, of a step that is discarded; only of a kill
detection    until the controller knows that the group has failed; of one that leaves, until its state is safe
let-go       until rank 0's process is free of its group
rendezvous   until rank 0 begins to train in the next group; with the processes that the others have to let go of
restore      until all is as after the last step: connections, model, optimizer, state
first step   what the first step takes more than a usual one
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from springtide.events import Event, Failed, Left, Started, StepDone

PHASES = ("under_way", "detection", "let_go", "rendezvous", "restore", "first_step")


class Restart(NamedTuple):
    """What happened between two steps that follow each other in time."""

    last: StepDone
    between: list[Event]
    """Everything but steps, in order of time."""
    first: StepDone
    usual_s: float
    """Median of the steps that follow, of as many workers [s]."""

    @property
    def gap_s(self) -> float:
        """From the end of the last step to that of the first one, less a usual step [s]."""
        return max(0.0, self.first.time_s - self.last.time_s - self.usual_s)

    @property
    def steps_lost(self) -> int:
        """Steps that were done and are done again."""
        return self.last.step + 1 - self.first.step


def restarts(events: Iterable[Event], many: int = 20) -> list[Restart]:
    """Each time that another group has started between two steps; ``many`` steps after it tell what is usual."""
    told = sorted(events, key=lambda event: (event.term, event.time_s))
    numbers = [number for number, event in enumerate(told) if isinstance(event, StepDone)]
    found = []
    for place, (before, after) in enumerate(itertools.pairwise(numbers)):
        between, last, first = told[before + 1 : after], told[before], told[after]
        assert isinstance(last, StepDone)
        assert isinstance(first, StepDone)
        if any(isinstance(event, Started) for event in between):
            later = [told[number] for number in numbers[place + 2 : place + 2 + many]]
            times = [
                one.step_time_s for one in later if isinstance(one, StepDone) and one.world_size == first.world_size
            ]
            found.append(Restart(last, between, first, statistics.median(times or [first.step_time_s])))
    return found


def phases(restart: Restart, began_s: float) -> dict[str, float]:
    """Seconds of each phase of a restart of ours for an event that began at ``began_s``; what the journal does not tell is
    part of the phase after it."""
    failed = [event.time_s for event in restart.between if isinstance(event, Failed)]
    left = [event.time_s for event in restart.between if isinstance(event, Left)]
    started = [event for event in restart.between if isinstance(event, Started)][-1]
    known_s = failed[0] if failed else left[-1] if left else restart.last.time_s
    in_process = dict(started.phases_s)
    rendezvous_s = in_process.pop("rendezvous", 0.0)
    trains_s = started.time_s - sum(in_process.values())
    marks = [
        restart.last.time_s,
        began_s if failed else restart.last.time_s,
        known_s,
        trains_s - rendezvous_s if rendezvous_s else known_s,
        trains_s,
        started.time_s,
        restart.first.time_s - restart.usual_s,
    ]
    for place in range(1, len(marks)):
        marks[place] = max(marks[place - 1], marks[place])
    return {name: after - before for name, (before, after) in zip(PHASES, itertools.pairwise(marks), strict=True)}


def show(found: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """A row an event, medians over its restarts."""
    print("\nphases, ms  " + "  ".join(f"{name.replace('_', ' '):>10}" for name in (*PHASES, "sum")))
    for event, rounds in found.items():
        cells = [statistics.median(one[name] for one in rounds) * 1e3 for name in PHASES]
        print(f"{event:11} " + "  ".join(f"{cell:>10.0f}" for cell in (*cells, sum(cells))))
