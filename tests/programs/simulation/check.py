"""What must hold whatever goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulation.clock import Clock, Process
from simulation.cluster import Cluster
from simulation.group import History, WorkerGroup
from simulation.store import Store
from springtide.checkpoint.format import COMMITTED
from springtide.errors import RunExists
from springtide.storage import Folder

COUNT_ANNOUNCED_LOSSES = True
"""Whether it is a violation that an announced loss costs steps. Some still do: where too few nodes stay to train on, the group
leaves too late for its save, or the state is in memory only when those nodes leave, too."""
STOPPED_S = 90.0
"""The same where processes are stopped, and there are enough others [s]."""
UNSAVED_S = 90.0
"""While nobody trains, what is in memory only is in the store within this time [s]."""
FORMS_S = 300.0
"""A group trains within this time of the moment from which capacity and the store stand [s]."""


class Watch:
    """Sees all that happens, and keeps what does not hold."""

    def __init__(self, clock: Clock, store: Store, cluster: Cluster, run: Folder, digests: list[int]) -> None:
        self.clock, self.store, self.cluster, self.run, self.digests = clock, store, cluster, run, digests
        self.violations: list[str] = []
        self.starts, self.newest = 0, 0
        self.only_notices = True
        """Whether every loss so far was announced, and the store was there."""
        self.can_train: Callable[[], bool] = lambda: False
        self.can_train_without_stopped: Callable[[], bool] = lambda: False
        self.lacks_step: Callable[[], bool] = lambda: False
        """Returns True if the newest state is in memory only, though nobody trains and the store and all processes are up."""
        self.losses = 0
        """Steps that were trained and then trained again."""
        self._committed, self._trained_s = 0, 0.0
        self._history: dict[int, tuple[int, ...]] = {}
        model = History()
        self._history[0] = model.value
        for step, digest in enumerate(digests, 1):
            model.learn(step, digest)
            self._history[step] = model.value
        self._idle_since_s: dict[str, float] = {}
        """What is there -> since when, and nobody trains [s]."""

    def say(self, what: str) -> None:
        """Note a violation."""
        self.violations.append(f"{self.clock.now:.1f} s: {what}")

    @property
    def idle_s(self) -> float:
        """How long nobody has trained [s]."""
        return self.clock.now - self._trained_s

    def committed(self, step: int) -> None:
        """A writer was told that its checkpoint is committed."""
        self._committed = max(self._committed, step)

    def trained(self, step: int) -> None:
        """Rank 0 has done a step."""
        self.newest = max(self.newest, step)
        self._idle_since_s.clear()
        self._trained_s = self.clock.now

    def began(self, group: WorkerGroup, step: int, term: int, state: tuple[int, ...]) -> None:
        """A group has its state."""
        self.starts += 1
        if state != self._history[step]:
            self.say(f"the state of step {step} in lease {term} is not the history of {step} steps")
        if step < self._committed:
            again = "step 0" if step == 0 else f"step {step}"
            self.say(f"lease {term} begins at {again} although step {self._committed} was committed")
        self.losses += self.newest - step
        if self.newest > step and self.only_notices and COUNT_ANNOUNCED_LOSSES:
            self.say(
                f"lease {term} begins at step {step}, {self.newest - step} before the newest, though every loss was announced"
            )
        self.newest = step

    def look(self) -> None:
        """Every few seconds: a group trains when it can."""
        self._idle_s(self.can_train(), FORMS_S, "all that is needed is there")
        self._idle_s(self.can_train_without_stopped(), STOPPED_S, "only some processes are stopped")
        self._idle_s(self.lacks_step(), UNSAVED_S, "the newest state is in memory only")

    def _idle_s(self, can: bool, most_s: float, why: str) -> None:
        since_s = self._idle_since_s.get(why)
        if not can:
            self._idle_since_s.pop(why, None)
        elif since_s is None:
            self._idle_since_s[why] = self.clock.now
        elif self.clock.now - since_s > most_s:
            self.say(f"nobody has trained for {most_s:.0f} s, though {why}")
            del self._idle_since_s[why]

    def ended(self, driver: Process, began: bool) -> None:
        """A driver has ended by itself."""
        error = driver.error
        if isinstance(error, RunExists) and not began:
            probe = "/.tmp-"
            wrote = [one.path for one in self.store.writes if one.process is driver and probe not in one.path]
            if wrote:
                self.say(f"a driver that was refused wrote {wrote}")
        elif not began or any(words in str(error) for words in ("saves failed one after the other", "in memory only")):
            return  # it says so: the store is away at the start, or for longer than checkpoint.max_failed allows
        elif error is not None and not isinstance(error, RunExists):
            self.say(f"a driver ended with {error!r}")

    def at_the_end(self, finished: bool, verified: Any) -> None:
        """After everything."""
        last = len(self.digests)
        if finished:
            names = [name for name in self.store.files if name.endswith(f"/{COMMITTED}")]
            if not any(f"step-{last:010d}" in name for name in names):
                self.say(f"finished, but step {last} is not committed")
            if not verified.ok:
                wrong = (*verified.mismatches, *verified.token_mismatches, *verified.chain_mismatches)
                self.say(f"verify: missing {verified.missing}, wrong {wrong[:2]}, {verified.steps_checked} checked")
