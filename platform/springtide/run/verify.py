"""Checks afterwards that every step trained on exactly the samples of the uninterrupted run.

The proof is the chain: a hash over all steps that is part of the training state (``stream/chain.py``). Each checkpoint and each
start of a worker group has its own. ``verify`` recomputes it from the order and compares; the journal's digests are compared
step by step, too, also after the newest checkpoint. A step is proven by either one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from springtide.checkpoint import branch
from springtide.checkpoint.format import Meta, committed, read_manifest, step_of
from springtide.config import RUN_CONFIG, Config, parse
from springtide.config.steps import OrderStep, StepsDone, one_more
from springtide.errors import CheckpointError
from springtide.events import Started, StepDone
from springtide.shards import is_predicted
from springtide.storage import Folder
from springtide.stream import Data, digest, open_data
from springtide.stream.chain import SKIPPED_UPDATES_KEPT, next_chain
from springtide.tracking.journal import last_steps, read_journal

_SHOWN = 10
"""Number of missing steps and of mismatches that a result lists."""
_COUNTED = 32
"""Number of steps whose tokens are counted in their rows where documents are masked."""


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A step that trained on other samples than the order has for it."""

    step: int
    """Counted from 1."""
    expected: str
    """Digest of the samples that the order has for the step, 16 hex digits; empty for a step that the run cannot have."""
    found: str
    """Digest of the samples that the ranks consumed, 16 hex digits."""


@dataclasses.dataclass(frozen=True)
class TokenMismatch:
    """A step in which another number of tokens counted than its rows have."""

    step: int
    """Counted from 1."""
    expected: int
    """Valid tokens of the rows of the step."""
    found: int
    """Tokens that counted in the loss, according to the journal."""


@dataclasses.dataclass(frozen=True)
class ChainMismatch:
    """A state that was not trained on the steps that the order has until it."""

    step: int
    """Steps done of the state."""
    after: int
    """The steps from the next one on to ``step`` are not those of the order: until this one the chain agrees, or is told
    to differ already."""
    where: str
    """Name of the checkpoint, or ``start of term N``."""
    expected: str
    """Chain of the steps that the order has, 32 hex digits; empty for a state that the run cannot have."""
    found: str
    """Chain of the state."""


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
    """Steps that were trained and are checked, by the journal's digest or by the chain, each counted once."""
    steps_trained_again: int
    """Tries after the first, because of restarts; each is checked, too."""
    steps_abandoned: int
    """Tries that are not part of the model any more: in an order that was abandoned later, by skipping steps that were done,
    or of steps that the run went back on and has not trained again. They are not checked."""
    loss_max_abs_diff: float
    """Largest difference between the losses of a step's tries [nats]."""
    world_sizes: tuple[int, ...]
    """The numbers of workers that trained, ascending."""
    goes_on_from: str
    """URL of the checkpoint of another run from whose chain this run's goes on; empty for none, or if it cannot be read any
    more: then the chain that the run says it began with is taken."""
    corpora: dict[str, CorpusUse]
    """Name of the corpus -> what the run has drawn from it."""
    missing: tuple[int, ...]
    """Steps that are not in the journal and that no chain proves, the first ten."""
    mismatches: tuple[Mismatch, ...]
    """The first ten."""
    token_mismatches: tuple[TokenMismatch, ...]
    """The first ten."""
    chain_mismatches: tuple[ChainMismatch, ...]
    """The first ten."""
    steps_proven_by_chain: int
    """Steps that the chain of a checkpoint or of a start proves, each counted once."""
    steps_proven_by_chain_alone: int
    """Those of them that the journal lacks: their curve is lost, their proof is not."""
    checkpoints_checked: int
    """Checkpoints that count and whose chain is compared."""
    checkpoints_unread: tuple[str, ...]
    """Names of checkpoints that count and have no chain that can be read: damaged, or of another version."""

    @property
    def ok(self) -> bool:
        """Whether there was a step to check, none is missing and each was trained on the samples of the order."""
        wrong = (*self.missing, *self.mismatches, *self.token_mismatches, *self.chain_mismatches)
        return self.steps_checked > 0 and not wrong

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, as ``springtide verify --json`` prints it."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


def verify(run: Folder) -> Verification:
    """Recompute each step's digest, and the chain of all steps, from the order alone; compare them with the samples that
    the ranks consumed.

    The tokens of a step follow from the order where all tokens of a row count. Where some are not predicted they
    are counted in the rows of 32 steps and of those that the journal lacks; of other steps the journal's number is taken,
    which the chain then confirms. Which updates the step guard skipped, the state itself lists. A branch and a stage are
    checked from the other run's checkpoint on, from whose chain theirs goes on.

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
        >>> from springtide.storage import Folder
        >>> found = verify(Folder("runs/mine"))
        >>> found.ok, found.steps_checked, found.steps_proven_by_chain
        (True, 8, 8)
    """
    config = parse(run.read(RUN_CONFIG), run.where(RUN_CONFIG))
    data, history = open_data(config.data), read_history(run)
    begin = branch.first_step(config.train)
    # a damaged line may name any step: a run has no more steps than it is to train, or than it has written down
    last = history.last_step(StepsDone(max(config.num_steps, begin + len(history.tries))))
    begin_chain = _begin_chain(config)
    walk = _Walk(data, history, begin, last, begin_chain)
    for record in sorted((*history.checkpoints, *history.starts), key=lambda one: one.step):
        if begin <= record.step <= last and record.chain:
            walk.check(record)
        elif record.step > last:
            walk.chain_mismatches.append(ChainMismatch(record.step, last, record.where, "", record.chain))
    walk.end()
    tries = history.tries
    spread = [max(one.loss for one in done) - min(one.loss for one in done) for done in tries.values()]
    return Verification(
        run=run.url,
        order_identity=data.order.identity,
        steps_checked=len(tries) + walk.num_proven_alone,
        steps_trained_again=history.num_again,
        steps_abandoned=history.num_abandoned,
        loss_max_abs_diff=max(spread, default=0.0),
        world_sizes=tuple(sorted({one.world_size for done in tries.values() for one in done})),
        goes_on_from=config.train.start_from if begin_chain else "",
        corpora={name: CorpusUse(*drawn) for name, drawn in data.drawn(last).items()},
        missing=tuple(walk.missing[:_SHOWN]),
        mismatches=tuple(walk.mismatches[:_SHOWN]),
        token_mismatches=tuple(walk.token_mismatches[:_SHOWN]),
        chain_mismatches=tuple(walk.chain_mismatches[:_SHOWN]),
        steps_proven_by_chain=walk.num_proven,
        steps_proven_by_chain_alone=walk.num_proven_alone,
        checkpoints_checked=sum(bool(one.chain) for one in history.checkpoints),
        checkpoints_unread=tuple(history.unread + [one.where for one in history.checkpoints if not one.chain]),
    )


def _begin_chain(config: Config) -> str | None:
    """Return the chain of the state that a run begins with; None if the run that it is of cannot be read any more."""
    train = config.train
    if not train.start_from or train.start_with == "weights":
        return ""
    try:
        return read_manifest(*branch.split(train.start_from)).meta.chain or None
    except (CheckpointError, OSError):
        return None


class _Walk:
    """The steps of a run in their order, each recomputed once: from one recorded chain to the next."""

    def __init__(self, data: Data, history: History, begin: StepsDone, last: StepsDone, chain: str | None) -> None:
        """``last``: the last step to check; ``chain``: of the first ``begin`` steps, None if it is not known."""
        self._data, self._tries = data, history.tries
        self._step, self._checked, self._last = begin, begin, last
        self._chain = chain
        self._not_in_journal: list[int] = []
        """Steps since the last recorded chain that the journal lacks."""
        self._counted = set(np.linspace(begin + 1, last, _COUNTED).astype(int).tolist())
        self.missing: list[int] = []
        beyond = (one for step, done in sorted(self._tries.items()) if step > last for one in done)
        self.mismatches = [Mismatch(one.step, "", one.digest) for one in beyond]
        self.token_mismatches: list[TokenMismatch] = []
        self.chain_mismatches: list[ChainMismatch] = []
        self.num_proven = 0
        self.num_proven_alone = 0
        """Those of the proven steps that the journal lacks."""

    def check(self, record: RecordedChain) -> None:
        """Walk to the step of a recorded chain and compare the chain with the one of the order."""
        while self._step < record.step:
            self._advance(record)
        if self._chain == record.chain:
            self.num_proven += self._step - self._checked
            self.num_proven_alone += len(self._not_in_journal)
        else:
            self.missing += self._not_in_journal
        if self._chain not in (None, record.chain):
            told = ChainMismatch(record.step, self._checked, record.where, str(self._chain), record.chain)
            self.chain_mismatches.append(told)
        self._chain, self._checked, self._not_in_journal = record.chain, record.step, []

    def end(self) -> None:
        """Walk to the last step: after the last recorded chain, only the journal proves a step."""
        while self._step < self._last:
            self._advance(None)
        self.missing += self._not_in_journal

    def _advance(self, record: RecordedChain | None) -> None:
        """Recompute one more step. ``record``: the next recorded chain."""
        self._step = one_more(self._step)
        order, tries = self._data.order, self._tries.get(self._step, [])
        step = order.step_before(self._step)
        sample_ids = order.batch(step)
        expected, tokens = digest(sample_ids), self._tokens(sample_ids, tries)
        for one in tries:
            if one.digest != f"{expected:016x}":
                self.mismatches.append(Mismatch(self._step, f"{expected:016x}", one.digest))
            if one.step_tokens != tokens:
                self.token_mismatches.append(TokenMismatch(self._step, tokens, one.step_tokens))
        if not tries:
            self._not_in_journal.append(self._step)
        if record is None or self._chain is None:
            return
        updated = record.has_update(step)
        if updated is None:
            updated = tries[-1].updated if tries else True
        self._chain = next_chain(self._chain, step, expected, tokens, updated)

    def _tokens(self, sample_ids: np.ndarray, tries: Sequence[StepDone]) -> int:
        """Return the valid tokens of the current step: of all its rows, of the rows as they are read, or the journal's."""
        if not self._data.has_loss_mask:
            return len(sample_ids) * self._data.sequence_length
        if tries and self._step not in self._counted:
            return tries[-1].step_tokens
        _, tokens = self._data.rows(sample_ids)
        return int(is_predicted(tokens[:, 1:]).sum())


# What a run's folder has on record of its steps: the tries of each step in its journal, and the chains of its states.


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
