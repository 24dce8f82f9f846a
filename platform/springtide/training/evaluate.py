"""Evaluation on held-out sets: loss and bits per byte."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from springtide.checkpoint import branch
from springtide.checkpoint.averages import MissingAverage
from springtide.checkpoint.format import Meta, read_manifest, step_of
from springtide.checkpoint.load import load
from springtide.checkpoint.restore import Restored
from springtide.checkpoint.retention import note_reader
from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.distributed import World, alone, on_first, sum_over_ranks
from springtide.distributed.fsdp import in_precision
from springtide.elastic import GroupRequest
from springtide.errors import CorpusError, explain
from springtide.events import Evaluated, Event
from springtide.model import whole
from springtide.optim.average import averaged_weights
from springtide.shards import HELDOUT, signed
from springtide.storage import Folder
from springtide.stream import Data, open_data
from springtide.training.forgetting import FirstLosses
from springtide.training.losses import loss_mask, row_nats
from springtide.training.part import DoneStep, Part, Verdict
from springtide.training.state import TrainState


class Evaluations(Part):
    """The evaluations of one worker group: before the first step of a run, every ``train.eval_every`` steps, and at the end."""

    def __init__(
        self,
        config: Config,
        data: Callable[[], Data],
        world: World,
        state: TrainState,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        """``data``: returns the data with the current order of samples, which a rollback changes. ``heartbeat``: called before
        each forward pass."""
        self._config, self._data, self._world, self._state, self._heartbeat = config, data, world, state, heartbeat
        self.losses: dict[StepsDone, float] = {}
        """Step -> held-out loss at that step. Cleared at each restore, so that it has no losses from before a rollback."""
        self._first = FirstLosses()
        """Losses at step 0 on the held-out sets of the base run, the run whose weights this run started from. Later losses are
        compared with these losses to measure forgetting."""
        self._has_time = False
        """True if the newest step received no request to stop or leave, so that there is time to evaluate. False before the
        first step after a restore."""

    def begin(self, found: Restored | None) -> None:
        self.losses.clear()  # a rollback abandons the weights that had these losses
        self._has_time = False
        if found is None:
            return
        first = FirstLosses.in_state(found.meta)
        self._first = first if first.losses else self._first
        if "heldout_loss" in found.meta.metrics:
            self.losses[found.meta.step] = found.meta.metrics["heldout_loss"]

    def at_start(self) -> Iterator[Event]:
        """Evaluate before the first step of the run. Also evaluate a restored step if its evaluation is due but missing: the
        previous group may have had to leave before it could evaluate."""
        if self._state.step == branch.first_step(self._config.train) or self._is_due:
            yield from self.now()

    def after_step(self, done: DoneStep) -> Iterator[Event]:
        self._has_time = not done.result.requests & {GroupRequest.STOP, GroupRequest.LEAVE, GroupRequest.EVACUATE}
        return iter(())

    def between_steps(self, done: DoneStep) -> Iterator[Event]:
        if self._is_due:
            yield from self.now()

    def at_end(self, verdict: Verdict) -> Iterator[Event]:
        """Evaluate after the last step, before the last save. A group that must end soon, or that starts at the last step,
        saves first, and ``sample.Closing`` evaluates afterwards."""
        if verdict is Verdict.FINISH and self._has_time:
            yield from self.now()

    def describe(self, meta: Meta) -> Meta:
        """Add to a checkpoint's metadata the held-out loss of this step, if it was evaluated, and the losses at step 0."""
        metrics = {"heldout_loss": self.losses[meta.step]} if meta.step in self.losses else {}
        return meta.adding(self._first.components, metrics)

    @property
    def _is_due(self) -> bool:
        train = self._config.train
        return train.eval_every > 0 and self._state.step % train.eval_every == 0 and not train.eval_async

    def now(self) -> Iterator[Evaluated]:
        """Evaluate the current weights and their average, at most once per step; all ranks call it together."""
        train, state = self._config.train, self._state
        if not train.eval_tokens or state.step in self.losses:
            return
        rows, padded = train.rows_at_once, self._config.parallel.compile
        data, how = self._data(), (int(train.eval_tokens), rows, padded, self._heartbeat)
        found = evaluate(state.model, data, self._world, state.step, *how)
        self.losses[state.step] = found.heldout_loss
        if not state.step:
            self._first = on_first(lambda: FirstLosses.of(self._config, data, found))
        found = self._first.compared(found)
        with averaged_weights(state.model, state.optimizer) as exist:
            if exist:
                averaged = evaluate(state.model, data, self._world, state.step, *how)
                found = dataclasses.replace(found, ema_heldout_loss=averaged.heldout_loss)
        yield found


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Data,
    world: World,
    step: StepsDone,
    num_tokens: int,
    micro_batch: int,
    padded: bool = False,
    heartbeat: Callable[[], None] = lambda: None,
) -> Evaluated:
    """Return the losses on about ``num_tokens`` tokens of held-out text. The same number of rows is read from each held-out
    set: at least one, and all rows of a set that has fewer.

    Micro-batches hold rows of several sets and are spread over the ranks. So the bits of the result do not depend on the world
    size, and the cost does not depend on the number of sets. ``padded``: add padding rows, so that the model is never called
    with fewer than ``micro_batch`` rows. ``heartbeat``: called before each forward pass. ``heldout_loss`` and
    ``heldout_bits_per_byte`` weight the corpora by their shares in the data mixture of the last step. Raises CorpusError if the
    rows of a set have no predicted token.
    """
    rows = HeldoutRows(data, num_tokens)
    model.eval()
    sums = _sums(model, world, rows, micro_batch * padded, micro_batch, heartbeat)
    model.train()
    nats, num_bytes = {}, {}
    for number, name in enumerate(data.eval_names):
        # fsum rounds only the final sum, so the order of rows does not change the result
        total, tokens, size = (math.fsum(column) for column in sums[rows.sets == number].T.tolist())
        if not tokens or not size:
            limit = f"the rows of the held-out set {name!r} predict no text"
            raise CorpusError(explain("train.eval_tokens", num_tokens, limit, "raise it, or hold out other text"))
        nats[name], num_bytes[name] = total / tokens, size / tokens
    shares = data.heldout_shares(step)
    loss = math.fsum(share * nats[name] for name, share in shares.items())
    per_byte = loss / math.log(2) / math.fsum(share * num_bytes[name] for name, share in shares.items())
    return Evaluated(
        step=step,
        heldout_loss=loss,
        heldout_bits_per_byte=per_byte,
        rows=len(rows.sets),
        tokens=int(sums[:, 1].sum()),
        corpora={name: nats[name] / math.log(2) / num_bytes[name] for name in nats},
        losses=nats,
    )


class HeldoutRows:
    """The rows of an evaluation, in a fixed order, spread evenly over each held-out set."""

    def __init__(self, data: Data, num_tokens: int) -> None:
        self._readers, self.length = data.splits(HELDOUT), data.sequence_length
        there = [corpus.manifest.splits[HELDOUT].rows for corpus in data.heldout]
        share = math.ceil(math.ceil(num_tokens / self.length) / len(there))
        found = [np.arange(min(share, rows)) * rows // min(share, rows) for rows in there]
        self.sets = np.repeat(np.arange(len(found)), [len(rows) for rows in found])
        self._rows = np.concatenate(found)

    def read(self, where: slice) -> tuple[np.ndarray, np.ndarray]:
        """Read the slice ``where`` of the evaluation's rows. Returns token ids, int64 (n, L + 1), and the bytes of text of each
        row, int64 (n,). A token that the loss ignores is ``~id``, a negative number (``shards.signed``)."""
        sets, rows = self.sets[where], self._rows[where]
        tokens, num_bytes = np.empty((len(rows), self.length + 1), np.int64), np.empty(len(rows), np.int64)
        for number in np.unique(sets).tolist():
            here = sets == number
            found = self._readers[number].read(rows[here])
            tokens[here], num_bytes[here] = signed(found.tokens), found.num_bytes
        return tokens, num_bytes


def _sums(
    model: nn.Module,
    world: World,
    rows: HeldoutRows,
    padded_rows: int,
    micro_batch: int,
    heartbeat: Callable[[], None],
) -> np.ndarray:
    """Return the loss [nats], the number of predicted tokens and the bytes of text of each row, float64 (rows, 3).
    Micro-batches do not depend on the world size. All ranks run the same number of forward passes, some of them without
    rows."""
    count = len(rows.sets)
    table = torch.zeros(count, 3, dtype=torch.float64, device=world.device)
    forwards = math.ceil(math.ceil(count / micro_batch) / world.size)
    for index in range(forwards):
        heartbeat()
        begin = (index * world.size + world.rank) * micro_batch
        where = slice(min(begin, count), min(begin + micro_batch, count))
        tokens, num_bytes = rows.read(where)
        rows_BL = torch.from_numpy(tokens).to(world.device)
        counted = loss_mask(rows_BL).sum(dim=1)
        columns = row_nats(model, rows_BL, padded_rows), counted, torch.from_numpy(num_bytes).to(world.device)
        table[where] = torch.stack([column.double() for column in columns], dim=1)
    if world.size > 1:  # for each row, all ranks but one add zeros, so the sums are exact
        return np.array(sum_over_ranks(table.flatten(), world)).reshape(-1, 3)
    return table.cpu().numpy()


def evaluate_checkpoint(run: Folder, config: Config, name: str, device_type: str = "cpu") -> Evaluated:
    """Evaluate a committed checkpoint, and its averaged weights if it has them, in a single process and in the precision of
    training. Raises CheckpointError if the bytes of the checkpoint have changed since its commit."""
    # open without labels (a teacher's predictions): only training needs them, and their files may be gone
    data = open_data(dataclasses.replace(config.data, labels=""))
    train, world = config.train, alone(torch.device(device_type))

    def evaluated(averaged: bool = False) -> Evaluated:
        model = whole(config.model, data.vocab_size, *data.document_ids)
        with note_reader(run, name):
            load(run, name, model, averaged=averaged)
        model, step = in_precision(model, config.parallel).to(world.device), step_of(name) or StepsDone(0)
        return evaluate(model, data, world, step, int(train.eval_tokens), train.rows_at_once)

    now = evaluated()
    found = FirstLosses.in_state(read_manifest(run, name).meta).compared(now)
    with contextlib.suppress(MissingAverage):
        found = dataclasses.replace(found, ema_heldout_loss=evaluated(averaged=True).heldout_loss)
    return found
