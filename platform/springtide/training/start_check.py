"""Checks that a run can start from a checkpoint of another run, before anything of the run is written."""

from __future__ import annotations

import torch

from springtide import config as configs
from springtide.checkpoint.adapters import has_adapter, without_adapter
from springtide.checkpoint.averages import match_averages
from springtide.checkpoint.branch import FIELD, split
from springtide.checkpoint.format import AVERAGED, FISHER, IMPORTED, Identity, read_manifest
from springtide.checkpoint.fresh_start import of_another_order
from springtide.checkpoint.load import Mismatch, by_tensor, check_names, read_pieces, wider_tensors, without
from springtide.checkpoint.new_blocks import new_outputs, with_new_blocks
from springtide.checkpoint.tensors import materialize, named_tensors
from springtide.config import Config
from springtide.config.objective import OBJECTIVES, OF_PAIRS
from springtide.errors import CheckpointError, ConfigError, explain
from springtide.model import as_held, make
from springtide.model.objective import Objective
from springtide.optim.build import optimizer_of
from springtide.optim.parameter_groups import freeze
from springtide.stream import Data
from springtide.training.anchor import check_fisher, check_settings
from springtide.training.teacher import check_teacher


def check_start(config: Config, identity: Identity, tokenizer_digest: str) -> Config:
    """Check that a run of ``config`` can begin with the checkpoint ``train.start_from``. Returns the config that this
    checkpoint was saved with. Raises ConfigError if the run cannot begin with it.

    Args:
        config: the run's config.
        identity: maps a number of steps done to the identity (a hash) of this run's data order for these steps.
        tokenizer_digest: digest of this run's tokenizer. The weights of a checkpoint are useless with another tokenizer.
    """
    url = config.train.start_from
    run, name = split(url)
    try:
        manifest = read_manifest(run, name)
    except CheckpointError as error:
        raise ConfigError(explain(FIELD, url, f"cannot be used: {error}", "name another checkpoint")) from None
    meta, same_order = manifest.meta, config.train.start_with == "state"
    if config.train.start_with != "weights" and meta.labels.keys() & {AVERAGED, IMPORTED}:
        of = f"the averaged weights of {meta.labels[AVERAGED]}" if AVERAGED in meta.labels else "imported weights"
        holds = f"holds {of} and no state of an optimizer"
        raise ConfigError(explain(FIELD, url, holds, "set train.start_with = weights"))
    if FISHER in meta.labels:
        raise ConfigError(explain(FIELD, url, "holds a Fisher and no weights", "set objective.anchor to this URL"))
    if same_order and (problem := of_another_order(run, meta, identity)):
        remedy = "or train.start_with = optimizer or weights, to begin at step 0 of this order"
        raise ConfigError(explain(FIELD, url, problem, remedy))
    if same_order and meta.step >= config.num_steps:
        end = f"is of step {meta.step}, and train.total ends at step {config.num_steps}"
        raise ConfigError(explain(FIELD, url, end, "raise train.total"))
    saved = configs.build_stored(manifest.config)
    if meta.tokenizer_digest not in ("", tokenizer_digest):
        dataset = next(iter(saved.stream.mixture.values()), saved.shards.dataset)
        other = f"was trained with the tokenizer {meta.tokenizer_digest}, this run's data has {tokenizer_digest}"
        remedy = f"prepare the new text with corpus.tokenizer = {dataset}/tokenizer.json"
        raise ConfigError(explain(FIELD, url, other, remedy))
    return saved


def check_adapter(config: Config) -> None:
    """Raise ConfigError if an adapter, an anchor or new blocks need weights of another run and ``train.start_from`` names none,
    or if they contradict other settings."""
    check_settings(config)
    _check_new_blocks(config)
    if config.model.adapter != "none" and not config.train.start_from:
        problem = "keeps the weights that a run starts from, and train.start_from names none"
        remedy = "name a checkpoint there, with train.start_with = weights, or use none"
        raise ConfigError(explain("model.adapter", config.model.adapter, problem, remedy))


def _check_new_blocks(config: Config) -> None:
    """Raise ConfigError if the run cannot begin with the blocks that ``train.new_blocks`` inserts."""
    new, model, problem, remedy = config.train.new_blocks, config.model, "", ""
    if not new:
        return
    old = [number for number in range(model.num_layers) if number not in new]
    if not config.train.start_from or config.train.start_with != "weights":
        problem, remedy = "are put between weights of another run", "name it, with train.start_with = weights"
    elif model.source or model.adapter != "none":
        other = f"model.source = {model.source!r}" if model.source else f"model.adapter = {model.adapter!r}"
        problem, remedy = f"are for the decoder's own blocks, and not for {other}", "leave one of them out"
    elif config.objective.anchor:
        problem, remedy = "have no weights to be kept near to", "leave objective.anchor empty; freeze the old blocks"
    elif sorted({*new}) != [*new] or new[0] < 0 or new[-1] >= model.num_layers or not old:
        limit = f"are not some of the {model.num_layers} blocks of model.num_layers, each once and in order"
        problem, remedy = limit, "count the new blocks in model.num_layers, too, and number all from 0"
    elif moved := [here for before, here in enumerate(old) if model.window_of(here) != model.window_of(before)]:
        problem = f"make block {moved[0]} another kind of layer than it was (model.global_every = {model.global_every})"
        remedy = "put whole periods of global_every blocks between those of the model"
    if problem:
        raise ConfigError(explain("train.new_blocks", list(new), problem, remedy))


def check_objective(config: Config, data: Data) -> None:
    """Raise ConfigError if the objective does not fit its labels or its teacher, or needs pairs of answers that the dataset
    does not contain."""
    one, manifest = config.objective, data.corpora[0].whole
    if one.teacher:
        check_teacher(config, manifest)
    if one.source in OF_PAIRS and not manifest.holds_pairs:
        problem = f"learns from pairs of answers, and {data.corpora[0].url} holds none"
        remedy = "prepare records of prompt, chosen and rejected, with corpus.chat_template"
        raise ConfigError(explain("objective.source", one.source, problem, remedy))
    if (data.labels is not None or one.source in OBJECTIVES) and not one.teacher:
        given = data.labels.layout if data.labels else None, one, *data.document_ids
        Objective(one.source, data.vocab_size, torch.device("cpu"), *given)


def check_tensors(config: Config, data: Data) -> None:
    """Check that the checkpoint ``train.start_from`` has each tensor that the run takes from it, with the shape that it has in
    the run's model. Reads the checkpoint's indexes, but no data.

    For a user's own model (``model.source``), which only the worker group builds, only the presence of optimizer state is
    checked. Raises ConfigError with the tensors that are missing, unexpected or of another shape."""
    url, takes_optimizer = config.train.start_from, config.train.start_with != "weights"
    run, name = split(url)
    try:
        manifest = read_manifest(run, name)
        pieces = read_pieces(run, name, manifest)
    except CheckpointError as error:
        raise ConfigError(explain(FIELD, url, f"cannot be used: {error}", "name another checkpoint")) from None
    if takes_optimizer and not any(piece.tensor.startswith("optim/") for piece in pieces):
        remedy = "or train.start_with = weights, with which the optimizer begins anew"
        raise ConfigError(explain(FIELD, url, "has no state of an optimizer", f"name another checkpoint, {remedy}"))
    if config.model.source:
        return
    model = make(config.model, data.vocab_size, *data.document_ids)
    freeze(model, config.optim)
    check_fisher(config, model)
    optimizer = None
    if takes_optimizer:
        optimizer = optimizer_of(model, config.optim, fused=False)
        # create the optimizer state, as tensors without memory: only names and shapes are compared
        materialize(optimizer)
    else:
        pieces = [piece for piece in pieces if piece.tensor.startswith("model/")]
    tensors = named_tensors(model, optimizer)
    if not takes_optimizer and not has_adapter(manifest):
        tensors = without_adapter(tensors)
    if new := config.train.new_blocks:
        pieces, outputs = with_new_blocks(pieces, new), new_outputs(tensors, new)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in outputs}
    if not takes_optimizer and config.model.adapter != "none":
        pieces, tensors = without(wider_tensors(pieces, tensors, as_held), pieces, tensors)
    pieces, wanted, _ = match_averages(pieces, tensors)
    try:
        check_names(by_tensor(pieces), wanted)
    except Mismatch as error:
        remedy = "or train.start_with = weights" if takes_optimizer else "or the shapes of that model"
        raise ConfigError(explain(FIELD, url, str(error), remedy)) from None
    except CheckpointError as error:
        raise ConfigError(explain(FIELD, url, f"cannot be used: {error}", "name another checkpoint")) from None
