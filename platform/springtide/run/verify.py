"""Check, after training, that every step trained on exactly the samples that an uninterrupted run would have used.

The proof is the chain: a hash over all steps, which is part of the training state (``stream/chain.py``). Each checkpoint and
each start of a worker group records the chain of its state. ``verify`` recomputes this chain from the run's fixed order of
samples and compares it with each record. For each step it also compares the digest (checksum of sample ids) in the journal,
which covers the steps after the newest checkpoint. A step is proven if a recorded chain or its digest matches.
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
"""The result of ``verify`` lists at most this many missing steps, and at most this many mismatches of each kind."""
_COUNTED = 32
"""Number of steps whose rows are read to count their valid (not masked) tokens, if some tokens are masked in the loss."""


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A step that was trained on wrong samples: not those that the run's fixed order of samples gives for this step."""

    step: int
    """Number of the step, counted from 1."""
    expected: str
    """Digest (checksum) of the samples that the order gives for the step, 16 hex digits; empty after the run's last step."""
    found: str
    """Digest (checksum) of the samples that the ranks read, 16 hex digits."""


@dataclasses.dataclass(frozen=True)
class TokenMismatch:
    """A step whose number of tokens in the loss differs from the number of valid (not masked) tokens in its rows."""

    step: int
    """Number of the step, counted from 1."""
    expected: int
    """Number of valid (not masked) tokens in the step's rows."""
    found: int
    """Number of tokens in the step's loss, according to the journal."""


@dataclasses.dataclass(frozen=True)
class ChainMismatch:
    """A checkpoint, or start of a worker group, whose training state was trained on wrong samples. Its chain (hash over all
    steps) differs from the chain computed from the run's order of samples."""

    step: int
    """Number of steps that the state was trained for."""
    after: int
    """The wrong samples were used in a step from ``after + 1`` to ``step``. Earlier steps with wrong samples have a
    ``ChainMismatch`` of their own."""
    where: str
    """Name of the checkpoint, or ``start of term N``: the start of a worker group by the run's N-th driver."""
    expected: str
    """Chain computed from the order of samples, 32 hex digits; empty for a state after the run's last step."""
    found: str
    """Chain that is recorded with the state, 32 hex digits."""


@dataclasses.dataclass(frozen=True)
class CorpusUse:
    """How much of one corpus a run has trained on."""

    rows: int
    """Number of rows of the corpus that were trained on; a row that was used twice counts twice."""
    epochs: float
    """Number of passes over the corpus; 1.5 means that half of its rows were used twice."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of ``verify``: whether a run trained on exactly the samples of its order."""

    run: str
    """URL or path of the run's folder."""
    order_identity: str
    """Hash of everything that determines the run's order of samples."""
    steps_checked: int
    """Number of trained steps that were checked, by a digest in the journal or by a chain. A repeated step counts once."""
    steps_trained_again: int
    """Number of repeated executions of steps, because of restarts or rollbacks. All are checked, except ``steps_abandoned``."""
    steps_abandoned: int
    """Number of executions of steps that the current model no longer contains; they are not checked. Either the order of
    samples was changed from an earlier step on (a rollback skips a spike). Or the run restarted from an earlier step and has
    not trained these steps again."""
    loss_max_abs_diff: float
    """Largest difference between the losses of two executions of the same step [nats]; 0 if no step was repeated."""
    world_sizes: tuple[int, ...]
    """All world sizes that the run trained with, ascending."""
    goes_on_from: str
    """URL of the other run's checkpoint from which this run started, and whose chain it continues. Empty if there is no
    such checkpoint, or if its chain cannot be read. If it cannot be read, the first chain that this run recorded is trusted
    without proof."""
    corpora: dict[str, CorpusUse]
    """Name of a corpus (dataset source) -> how much of it the run has trained on."""
    missing: tuple[int, ...]
    """The first ten steps that have no record in the journal and that no chain proves."""
    mismatches: tuple[Mismatch, ...]
    """The first ten executions of a step whose samples differ from the samples that the order gives for it."""
    token_mismatches: tuple[TokenMismatch, ...]
    """The first ten executions of a step whose number of tokens differs from the valid (not masked) tokens in its rows."""
    chain_mismatches: tuple[ChainMismatch, ...]
    """The first ten records of a chain that differ from the chain computed from the order of samples."""
    steps_proven_by_chain: int
    """Number of steps that the chain of a checkpoint or of a worker group's start proves, each counted once."""
    steps_proven_by_chain_alone: int
    """Number of steps in ``steps_proven_by_chain`` that have no record in the journal. Their losses are lost, but the chain
    still proves their samples."""
    checkpoints_checked: int
    """Number of committed checkpoints whose chain was compared with the computed chain."""
    checkpoints_unread: tuple[str, ...]
    """Names of committed checkpoints whose chain could not be read: damaged, or written by another version."""

    @property
    def ok(self) -> bool:
        """True if at least one step was checked, no step is missing, and there is no mismatch of any kind."""
        wrong = (*self.missing, *self.mismatches, *self.token_mismatches, *self.chain_mismatches)
        return self.steps_checked > 0 and not wrong

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, as ``springtide verify --json`` prints it."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


def verify(run: Folder) -> Verification:
    """Recompute the digest of each step's samples, and the chain (hash over all steps), from the order of samples alone.
    Compare them with the digests and chains recorded for the samples that the ranks consumed.

    The chain also contains the number of valid tokens of each step. If no token is masked in the loss, that number follows from
    the order. Otherwise it is counted in the rows of 32 steps, and of all steps that the journal lacks. For the remaining steps
    the journal's number is used, and the chain confirms it. Updates that the step guard skipped are listed in the training
    state itself. A run that starts from another run's checkpoint (a branch or a stage) is checked from its start on; its chain
    continues that checkpoint's chain.

    Args:
        run: folder of a run that trains or has ended. Its datasets must be readable, too.

    Returns:
        The number of checked steps, and the steps that are missing or trained on different samples.

    Raises:
        ConfigError: the run's datasets are no longer compatible with each other.
        CorpusError: a dataset is missing.

    Source:
        docs/decisions/0002-order-of-samples.md: the order; and the digest, a sum over sample ids that is
        equal for any split of the rows among the ranks.

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
    # check no more steps than the run has or the journal lists: a damaged line of the journal may contain a huge step number
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
    """Return the chain of the state that a run begins with: empty for new weights and for ``train.start_with = weights``. None
    if the run starts from another run's checkpoint that cannot be read, or that has no chain."""
    train = config.train
    if not train.start_from or train.start_with == "weights":
        return ""
    try:
        return read_manifest(*branch.split(train.start_from)).meta.chain or None
    except (CheckpointError, OSError):
        return None


class _Walk:
    """One pass over the steps of a run, from one recorded chain to the next. It computes the samples of each step once."""

    def __init__(self, data: Data, history: History, begin: StepsDone, last: StepsDone, chain: str | None) -> None:
        """``begin``: steps done when the run began; ``last``: last step to check; ``chain``: chain of the state with which the
        run began, None if it is not known."""
        self._data, self._tries = data, history.tries
        self._step, self._checked, self._last = begin, begin, last
        self._chain = chain
        self._not_in_journal: list[int] = []
        """Steps since the last compared chain that have no record in the journal."""
        self._counted = set(np.linspace(begin + 1, last, _COUNTED).astype(int).tolist())
        self.missing: list[int] = []
        beyond = (one for step, done in sorted(self._tries.items()) if step > last for one in done)
        self.mismatches = [Mismatch(one.step, "", one.digest) for one in beyond]
        self.token_mismatches: list[TokenMismatch] = []
        self.chain_mismatches: list[ChainMismatch] = []
        self.num_proven = 0
        self.num_proven_alone = 0
        """Number of steps counted in ``num_proven`` that have no record in the journal."""

    def check(self, record: RecordedChain) -> None:
        """Recompute the chain up to the step of ``record``, and compare the result with the recorded chain."""
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
        """Check the steps after the last recorded chain. Only the digests in the journal can prove their samples."""
        while self._step < self._last:
            self._advance(None)
        self.missing += self._not_in_journal

    def _advance(self, record: RecordedChain | None) -> None:
        """Recompute the samples of the next step, and compare them with each execution of the step in the journal. Then extend
        the computed chain by this step. ``record``: the next recorded chain; None if there is none."""
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
        """Return the number of valid (not masked) tokens of the current step. Without a loss mask, these are all tokens of its
        rows. With a loss mask, the number is taken from the journal. For a few steps, and for steps that the journal lacks, the
        tokens are counted in the rows instead."""
        if not self._data.has_loss_mask:
            return len(sample_ids) * self._data.sequence_length
        if tries and self._step not in self._counted:
            return tries[-1].step_tokens
        _, tokens = self._data.rows(sample_ids)
        return int(is_predicted(tokens[:, 1:]).sum())


# What a run's folder records: each execution (try) of a step in the journal, and the chains of checkpoints and of worker
# groups' starts.


@dataclasses.dataclass(frozen=True)
class RecordedChain:
    """The chain (hash over all steps) of a training state, as a checkpoint or the start of a worker group records it."""

    step: StepsDone
    chain: str
    """The chain, 32 hex digits; empty if the version that wrote the record had no chains."""
    skipped_updates: frozenset[OrderStep]
    """Steps without a weight update (such as spikes) in the history of this state, as indexes in the order of samples; at most
    the newest ``SKIPPED_UPDATES_KEPT``."""
    where: str
    """Name of the checkpoint, or ``start of term N``: the start of a worker group by the run's N-th driver."""

    def has_update(self, step: OrderStep) -> bool | None:
        """Return True if the state contains the weight update of ``step``, False if the update was skipped. Return None if that
        is not known: the list of skipped updates is full, and ``step`` is older than all of them."""
        if step in self.skipped_updates:
            return False
        lists_all = len(self.skipped_updates) < SKIPPED_UPDATES_KEPT
        return True if lists_all or step > min(self.skipped_updates) else None


@dataclasses.dataclass
class History:
    """What the journal and the checkpoints record about the current model. Executions of steps that the model no longer
    contains are counted and dropped."""

    tries: dict[StepsDone, list[StepDone]] = dataclasses.field(default_factory=dict)
    """Step -> its executions (tries), oldest first."""
    num_again: int = 0
    """Number of repeated executions of steps, including dropped executions."""
    num_abandoned: int = 0
    """Number of dropped executions. Either the order of samples was changed from an earlier step on, or the run restarted from
    an earlier step and has not trained the step again."""
    starts: list[RecordedChain] = dataclasses.field(default_factory=list)
    """The starts of worker groups from which the current model descends."""
    checkpoints: list[RecordedChain] = dataclasses.field(default_factory=list)
    """The committed checkpoints that could be read."""
    unread: list[str] = dataclasses.field(default_factory=list)
    """Names of the committed checkpoints that could not be read."""
    newest: Meta | None = None
    """Metadata of the newest checkpoint that could be read."""

    def last_step(self, most: StepsDone) -> StepsDone:
        """Return the highest step, at most ``most``, of any step in the journal, start of a worker group or checkpoint; 0 if
        there are no records."""
        steps = [one.step for one in (*self.starts, *self.checkpoints)]
        unread = [step for step in map(step_of, self.unread) if step is not None]
        return max((step for step in (*self.tries, *steps, *unread) if step <= most), default=StepsDone(0))


def read_history(run: Folder) -> History:
    """Read the journal and the committed checkpoints of a run, and return what they record about its current model."""
    found, identity = History(), ""
    seen: set[StepsDone] = set()
    events = read_journal(run)
    for event in events:
        if isinstance(event, StepDone):
            found.tries.setdefault(event.step, []).append(event)
            found.num_again += event.step in seen
            seen.add(event.step)
        elif isinstance(event, Started):
            # this start discards all states after its step: drop earlier starts from such states
            found.starts = [one for one in found.starts if one.step <= event.step]
            where = f"start of term {event.term}"
            found.starts.append(RecordedChain(event.step, event.chain, frozenset(event.skipped_updates), where))
            if event.order_identity != identity:
                for step in [step for step in found.tries if step > event.step]:
                    found.num_abandoned += len(found.tries.pop(step))
            identity = event.order_identity
    kept = {one.step for one in last_steps(events)}
    for step in found.tries.keys() - kept:  # a restart discarded these steps, and they were not trained again
        found.num_abandoned += len(found.tries.pop(step))
    for name in committed(run):
        try:
            meta = found.newest = read_manifest(run, name).meta
        except CheckpointError:  # the checkpoint is damaged, of another version, or was removed after it was listed
            found.unread.append(name)
            continue
        found.checkpoints.append(RecordedChain(meta.step, meta.chain, frozenset(meta.skipped_updates), name))
    if found.unread:  # list again: the run may have removed an old checkpoint meanwhile, which is no damage
        found.unread = [name for name in committed(run) if name in found.unread]
    return found
