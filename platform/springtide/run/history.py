"""What a run's folder has on record of its steps: the tries of each step in its journal, and the chains of its states."""

from __future__ import annotations

import dataclasses

from springtide.checkpoint.format import Meta, committed, read_manifest, step_of
from springtide.config.steps import OrderStep, StepsDone
from springtide.errors import CheckpointError
from springtide.events import Started, StepDone
from springtide.storage import Folder
from springtide.stream.chain import SKIPPED_UPDATES_KEPT
from springtide.tracking.journal import last_steps, read_journal


@dataclasses.dataclass(frozen=True)
class RecordedChain:
    """The chain of a state: of a checkpoint, or of one that a worker group started from."""

    step: StepsDone
    chain: str
    """Empty if a version of this package without chains recorded it."""
    skipped_updates: frozenset[OrderStep]
    """Steps of the order whose update the state lacks, at most the newest ``SKIPPED_UPDATES_KEPT``."""
    where: str
    """Name of the checkpoint, or ``start of term N``."""

    def has_update(self, step: OrderStep) -> bool | None:
        """Return whether the state has the update of ``step``, one of its steps; None if the step is older than those that it
        lists."""
        if step in self.skipped_updates:
            return False
        lists_all = len(self.skipped_updates) < SKIPPED_UPDATES_KEPT
        return True if lists_all or step > min(self.skipped_updates) else None


@dataclasses.dataclass
class History:
    """The record of the model that a run has now: tries that it rolled back are counted and dropped."""

    tries: dict[StepsDone, list[StepDone]] = dataclasses.field(default_factory=dict)
    """Step -> every time it was trained."""
    num_again: int = 0
    """Tries after a step's first, those included that were abandoned."""
    num_abandoned: int = 0
    """Tries of steps that another order has replaced since, or that the run went back on and has not trained again."""
    starts: list[RecordedChain] = dataclasses.field(default_factory=list)
    """The starts that the model descends from."""
    checkpoints: list[RecordedChain] = dataclasses.field(default_factory=list)
    """The checkpoints that count and could be read."""
    unread: list[str] = dataclasses.field(default_factory=list)
    """Names of checkpoints that count and could not be read."""
    newest: Meta | None = None
    """Meta data of the newest checkpoint that could be read."""

    def last_step(self, most: StepsDone) -> StepsDone:
        """Return the last step until ``most`` that is on record anywhere."""
        steps = [one.step for one in (*self.starts, *self.checkpoints)]
        unread = [step for step in map(step_of, self.unread) if step is not None]
        return max((step for step in (*self.tries, *steps, *unread) if step <= most), default=StepsDone(0))


def read_history(run: Folder) -> History:
    """Return what the journal and the checkpoints that count have on record."""
    found, identity = History(), ""
    seen: set[StepsDone] = set()
    events = read_journal(run)
    for event in events:
        if isinstance(event, StepDone):
            found.tries.setdefault(event.step, []).append(event)
            found.num_again += event.step in seen
            seen.add(event.step)
        elif isinstance(event, Started):
            # a later start from an earlier step: the model does not descend from the states beyond it
            found.starts = [one for one in found.starts if one.step <= event.step]
            where = f"start of term {event.term}"
            found.starts.append(RecordedChain(event.step, event.chain, frozenset(event.skipped_updates), where))
            if event.order_identity != identity:
                for step in [step for step in found.tries if step > event.step]:
                    found.num_abandoned += len(found.tries.pop(step))
            identity = event.order_identity
    kept = {one.step for one in last_steps(events)}
    for step in found.tries.keys() - kept:  # the run went back, and has not come here again
        found.num_abandoned += len(found.tries.pop(step))
    for name in committed(run):
        try:
            meta = found.newest = read_manifest(run, name).meta
        except CheckpointError:  # damaged, of another version, or removed meanwhile
            found.unread.append(name)
            continue
        found.checkpoints.append(RecordedChain(meta.step, meta.chain, frozenset(meta.skipped_updates), name))
    if found.unread:
        found.unread = [name for name in committed(run) if name in found.unread]
    return found
