"""Held-out loss, bits per byte, and a sample of text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from springtide.checkpoint.averages import MissingAverage
from springtide.checkpoint.format import step_of
from springtide.checkpoint.load import load
from springtide.checkpoint.retention import note_reader
from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.dist import World, alone, sum_over_ranks
from springtide.errors import ConfigError, explain
from springtide.events import Evaluated
from springtide.model import Decoder, KVCache, whole
from springtide.shards import HELDOUT, Manifest, SplitReader, signed
from springtide.store import Folder
from springtide.stream import Data, open_data
from springtide.training.step import loss_mask, token_loss


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Data,
    world: World,
    step: StepsDone,
    num_rows: int,
    micro_batch: int,
    padded: bool = False,
    heartbeat: Callable[[], None] = lambda: None,
) -> Evaluated:
    """Return the loss on ``num_rows`` held-out rows, the same number from each corpus; ``padded``: the model is never called
    with fewer than ``micro_batch`` rows; ``heartbeat`` is called before each forward pass."""
    share = math.ceil(num_rows / len(data.names))
    model.eval()
    totals = {
        name: _evaluate(model, reader, manifest, world, share, micro_batch, padded, heartbeat)
        for name, reader, manifest in zip(data.names, data.splits(HELDOUT), data.manifests, strict=True)
    }
    model.train()
    nats, tokens, num_bytes, rows = torch.stack(list(totals.values())).sum(0).tolist()
    return Evaluated(
        step=step,
        heldout_loss=nats / tokens,
        heldout_bits_per_byte=nats / math.log(2) / num_bytes,
        rows=int(rows),
        corpora={name: float(total[0] / math.log(2) / total[2]) for name, total in totals.items()},
    )


def _evaluate(
    model: nn.Module,
    reader: SplitReader,
    manifest: Manifest,
    world: World,
    num_rows: int,
    micro_batch: int,
    padded: bool,
    heartbeat: Callable[[], None],
) -> torch.Tensor:
    """Return nats, tokens, bytes and rows of ``num_rows`` rows spread over the held-out split, float64 (4,). The ranks share
    the rows, and all run the same number of forwards."""
    split = manifest.splits[HELDOUT]
    num_rows = min(num_rows, split.rows)
    mine = (np.arange(num_rows) * split.rows // max(num_rows, 1))[world.rank :: world.size]
    most_rows = math.ceil(num_rows / world.size)
    forwards = math.ceil(most_rows / micro_batch)
    total = torch.zeros(4, dtype=torch.float64, device=world.device)
    for index in range(forwards):
        heartbeat()
        rows = mine[index * micro_batch : (index + 1) * micro_batch]
        tokens, num_bytes = np.empty((0, manifest.sequence_length + 1), dtype=np.int64), 0
        if len(rows):
            found = reader.read(rows)
            tokens, num_bytes = signed(found.tokens), int(found.num_bytes.sum())
        rows_BL = torch.from_numpy(tokens).to(world.device)
        counted = int(loss_mask(rows_BL).sum())
        counts = torch.tensor([counted, num_bytes, len(rows)], dtype=torch.float64, device=world.device)
        _, nats = token_loss(model, rows_BL, world, padded_rows=micro_batch * padded)
        total += torch.cat([nats.double().reshape(1), counts])
    if world.size > 1:
        return torch.tensor(sum_over_ranks(total, world), dtype=total.dtype)
    return total


def evaluate_checkpoint(run: Folder, config: Config, name: str, device_type: str = "cpu") -> Evaluated:
    """Evaluate a committed checkpoint, and its averaged weights if it has them, in a single process, in fp32. Raises
    CheckpointError if its bytes are not those that were committed."""
    data = open_data(config.data)
    model = whole(config.model, data.vocab_size, data.eos_id, data.bos_id)
    train, world = config.train, alone(torch.device(device_type))
    how = world, step_of(name) or StepsDone(0), train.eval_rows, train.rows_at_once
    with note_reader(run, name):
        load(run, name, model)
        found = evaluate(model.to(world.device), data, *how)
        try:
            load(run, name, model, averaged=True)
        except MissingAverage:
            return found
    averaged = evaluate(model, data, *how)
    return dataclasses.replace(found, ema_heldout_loss=averaged.heldout_loss)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    length: int,
    max_context: int,
    vocab_size: int,
    temperature: float,
    seed: int,
    end: int | None = None,
    agree: Callable[[int], int] = lambda drawn: drawn,
) -> list[int]:
    """Return up to ``length`` ids after ``prompt``, drawn at ``temperature``; the same for the same seed.

    ``temperature`` 0 takes the likeliest id each time; a negative one raises ConfigError. The text ends before the id
    ``end``, which is not returned. When the text outgrows ``max_context``, its last ``max_context // 2`` ids are read again; a
    user's model has no cache and reads the context for each id. If the model is sharded, all ranks call this, and ``agree``
    turns the id drawn here into the one that all ranks use.
    """
    if temperature < 0:
        raise ConfigError(
            explain("temperature", temperature, "must be at least 0", "0 takes the likeliest id each time")
        )
    generator, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    ids, new, past, seen = list(prompt), prompt[-max_context:], _past(model), 0
    model.eval()
    for _ in range(length):
        if seen + len(new) > max_context:
            new, past, seen = ids[-max(1, max_context // 2) :], _past(model), 0
        if past is None:
            logits_V = model(torch.tensor([ids[-max_context:]], device=device))[0, -1]
        else:
            logits_V = model(torch.tensor([new], device=device), past=past)[0, -1]
            seen += len(new)
        logits = logits_V[:vocab_size].float().cpu()
        if temperature == 0:
            drawn = int(logits.argmax())
        else:
            drawn = int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
        chosen = agree(drawn)
        if chosen == end:
            break
        new = [chosen]
        ids += new
    return ids[len(prompt) :]


def _past(model: nn.Module) -> KVCache | None:
    return KVCache(len(model.blocks)) if isinstance(model, Decoder) else None
