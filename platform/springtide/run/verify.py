"""Checks afterwards that every step trained on exactly the samples of the uninterrupted run."""

from __future__ import annotations

import dataclasses
from typing import Any

from springtide.checkpoint import branch
from springtide.config import RUN_CONFIG, parse
from springtide.config.steps import StepsDone, one_more
from springtide.events import Started, StepDone
from springtide.store import Folder
from springtide.stream import digest, open_data
from springtide.track.journal import read_journal

_SHOWN = 10
"""Number of missing steps and of mismatches that a result lists."""


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A step that trained on other samples than the order has for it."""

    step: int
    """Counted from 1."""
    expected: str
    """Digest of the samples that the order has for the step, 16 hex digits."""
    found: str
    """Digest of the samples that the ranks consumed, 16 hex digits."""


@dataclasses.dataclass(frozen=True)
class CorpusUse:
    """What a run has drawn from one corpus."""

    rows: int
    """Rows that were drawn, repeated ones too."""
    epochs: float
    """How often the whole corpus was drawn, with fractions."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """Whether a run trained on exactly the samples of its order."""

    run: str
    """URL or path of the run's folder."""
    order_identity: str
    """Hash of all that decides the order."""
    steps_checked: int
    """Steps that were trained and are checked, each counted once."""
    steps_trained_again: int
    """Tries after the first, because of restarts; each is checked, too."""
    steps_abandoned: int
    """Tries in an order that was abandoned later, by skipping steps that were done; they are not checked."""
    loss_max_abs_diff: float
    """Largest difference between the losses of a step's tries [nats]."""
    world_sizes: tuple[int, ...]
    """The numbers of workers that trained, ascending."""
    corpora: dict[str, CorpusUse]
    """Name of the corpus -> what the run has drawn from it."""
    missing: tuple[int, ...]
    """Steps that the journal lacks, the first ten."""
    mismatches: tuple[Mismatch, ...]
    """The first ten."""

    @property
    def ok(self) -> bool:
        """Whether there was a step to check, none is missing and each consumed the samples of the order."""
        return self.steps_checked > 0 and not self.missing and not self.mismatches

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, as ``springtide verify --json`` prints it."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


def verify(run: Folder) -> Verification:
    """Recompute each step's digest from the order alone and compare it with the samples that the ranks consumed.

    Args:
        run: the folder of a run, live or ended; its datasets must be readable, too.

    Returns:
        What was checked, and every step that is missing or trained on other samples.

    Raises:
        ConfigError: the datasets of the run do not fit together any more.
        CorpusError: a dataset is missing.

    Source:
        docs/decisions/0002-order-of-samples.md: the order, and the digest, a sum that no distribution over ranks changes.

    Examples:
        >>> from springtide.run.verify import verify
        >>> from springtide.store import Folder
        >>> found = verify(Folder("runs/mine"))
        >>> found.ok, found.steps_checked
        (True, 8)
    """
    config = parse(run.read(RUN_CONFIG))
    data = open_data(config.data)
    tries: dict[StepsDone, list[tuple[str, StepDone]]] = {}
    identity = ""
    for event in read_journal(run):
        if isinstance(event, Started):
            identity = event.order_identity
        elif isinstance(event, StepDone):
            tries.setdefault(event.step, []).append((identity, event))
    mismatches, checked = [], {}
    for step, done in tries.items():
        expected = f"{digest(data.order.batch(data.order.step_before(step))):016x}"
        # a try in another order was abandoned when the step was trained again; the model learned the last one
        counted = [one for place, (order, one) in enumerate(done) if order == done[-1][0] or place == len(done) - 1]
        checked[step] = counted
        mismatches += [Mismatch(step, expected, one.digest) for one in counted if one.digest != expected]
    first, last = one_more(branch.first_step(config.train)), max(tries, default=StepsDone(0))
    missing = [step for step in range(first, last + 1) if step not in tries]
    spread = [max(one.loss for one in done) - min(one.loss for one in done) for done in checked.values()]
    drawn = data.drawn(last)
    return Verification(
        run=run.url,
        order_identity=data.order.identity,
        steps_checked=len(tries),
        steps_trained_again=sum(len(done) - 1 for done in tries.values()),
        steps_abandoned=sum(len(tries[step]) - len(done) for step, done in checked.items()),
        loss_max_abs_diff=max(spread, default=0.0),
        world_sizes=tuple(sorted({one.world_size for done in checked.values() for one in done})),
        corpora={name: CorpusUse(int(one["rows"]), one["epochs"]) for name, one in drawn.items()},
        missing=tuple(missing[:_SHOWN]),
        mismatches=tuple(mismatches[:_SHOWN]),
    )
