"""Compute the Fisher information of a run's weights and store it as a checkpoint (``springtide train --fisher-tokens``)."""

from __future__ import annotations

import secrets
import time
from typing import Any, NamedTuple

from springtide import config as configs
from springtide.checkpoint import branch
from springtide.checkpoint.format import StagedPiece, committed, read_manifest, step_of
from springtide.config import Config
from springtide.errors import ConfigError, explain
from springtide.run.folder import Run, check_model_code
from springtide.storage import Folder, digest, to_json

_OF_ANOTHER: dict[str, Any] = {
    "stream.mixture": {},
    "stream.eval_datasets": {},
    "stream.weights": (),
    "stream.epoch_caps": {},
}
"""Overrides of settings that remove a run's own mixture of datasets, so that ``shards.dataset`` alone names the text to use."""


class Fisher(NamedTuple):
    """Where Fisher information (the importance of each weight) is stored. Another run uses it in ``objective.anchor``, so that
    it forgets less of what this model has learned."""

    url: str
    """URL of the folder with the Fisher information; the other run sets ``objective.anchor`` to it."""
    checkpoint: str
    """URL of the checkpoint whose Fisher information this is; the other run sets ``train.start_from`` to it."""
    tokens: int
    """Number of tokens from which the Fisher information was computed."""


def write_fisher(
    run: Run, to: str, tokens: int, dataset: str = "", step: int | None = None, trust_code: bool = False
) -> Fisher:
    """Compute the diagonal empirical Fisher information (importance of each weight) of a checkpoint, in this process.

    Stores it in the folder ``to``. Choose a dataset with knowledge that a later run, which starts from the checkpoint, should
    not forget. Needs three times the memory of the fp32 weights.

    Args:
        run: the run of the checkpoint.
        to: folder or URL to create.
        tokens: number of tokens of training text to use, in whole rows; about 100 rows are enough to begin with.
        dataset: prepared dataset with the text; empty: the run's own training data, in the mixture of the checkpoint's step.
        step: step of the checkpoint; None: the newest.
        trust_code: as for ``Run.evaluate``.

    Returns:
        The URLs of the Fisher information and of its checkpoint, and the number of tokens used.

    Raises:
        ConfigError: there is no such checkpoint, ``to`` is not empty, the dataset has another tokenizer, or a gradient is not
            finite. Nothing is written then.
        CheckpointError: the checkpoint is corrupt.

    Examples:
        >>> from springtide.run.fisher import write_fisher
        >>> found = write_fisher(st.open_run("runs/mine"), "runs/mine-fisher", tokens=512)
        >>> found.tokens, found.checkpoint.rpartition("/")[2]
        (512, 'step-0000000008')
    """
    from springtide.checkpoint.tensors import raw, type_name
    from springtide.checkpoint.weights_only import write_weights
    from springtide.training.anchor import labels_of_fisher
    from springtide.training.fisher import fisher_of_checkpoint

    if tokens < 1:
        raise ConfigError(explain("tokens", tokens, "is not a number of tokens", "give at least the tokens of one row"))
    target, config = Folder(to), run.config.override({"feed.cache": ""})
    if target.names():
        raise ConfigError(explain("out", to, "is not empty", "name another folder"))
    check_model_code(run.folder, config, trust_code)
    name = run.checkpoint_at(step)
    if dataset:
        config = config.override({**_OF_ANOTHER, "shards.dataset": Folder(dataset).url})
    found, counted = fisher_of_checkpoint(run.folder, name, config, tokens, "dataset")
    kinds = {f"model/{key}": (type_name(one.dtype), tuple(one.shape)) for key, one in found.items()}
    changes = {"chain": "", "skipped_updates": (), "metrics": {}, "components": {}, "saved_s": time.time()}
    meta = read_manifest(run.folder, name).meta.model_copy(
        update={**changes, "labels": labels_of_fisher(run.folder, name)}
    )

    def bytes_of(piece: StagedPiece) -> Any:
        part = tuple(slice(begin, begin + size) for begin, size in zip(piece.offsets, piece.sizes, strict=True))
        return raw(found[piece.tensor.removeprefix("model/")][part])

    write_weights(target, meta, configs.redact(run.config).model_dump(mode="json"), kinds, bytes_of)
    return Fisher(target.url, f"{run.folder.url}/checkpoints/{name}", counted)


def anchored(config: Config, tokens: int, dataset: str = "", resume: bool = False, trust_code: bool = False) -> Config:
    """Return ``config`` with ``objective.anchor`` set to the Fisher information (importance of each weight) of its checkpoint.

    The checkpoint is the one in ``train.start_from``, from which the run starts. The Fisher information is stored in
    ``run.root``. It is computed only if no earlier call with the same values has stored it.

    Args:
        config: settings of a run that starts from a checkpoint (``train.start_from``).
        tokens: as for ``write_fisher``.
        dataset: as for ``write_fisher``.
        resume: if the run exists already, use the anchor in its stored config.
        trust_code: as for ``write_fisher``.

    Raises:
        ConfigError: ``train.start_from`` is empty, ``objective.anchor`` is set already, or ``write_fisher`` raises it.
        CheckpointError: the checkpoint is corrupt.
    """
    from springtide.training.start_check import check_adapter

    start, anchor = config.train.start_from, config.objective.anchor
    if anchor:
        raise ConfigError(
            explain("--fisher-tokens", tokens, f"cannot be combined with objective.anchor = {anchor}", "omit one")
        )
    if not start:
        limit = "is of the checkpoint that a run starts from, and train.start_from is empty"
        raise ConfigError(explain("--fisher-tokens", tokens, limit, "set train.start_from to a run or checkpoint"))
    root = Folder(config.run.root)
    mine = Run(root / config.run.id) if resume and config.run.id else None
    if mine is not None and mine.folder.exists(configs.RUN_CONFIG):
        if not mine.config.objective.anchor:
            limit, remedy = "and the run that is resumed has no anchor", "leave it out, or choose another run.id"
            raise ConfigError(explain("--fisher-tokens", tokens, limit, remedy))
        return config.override({"objective.anchor": mine.config.objective.anchor})
    checkpoint = branch.resolve(start, "")  # resolve "newest" once: the run may commit another meanwhile
    run, name = branch.split(checkpoint)
    of = [run.url, name, read_manifest(run, name).meta.chain, tokens, Folder(dataset).url if dataset else ""]
    prefix = f"{run.name}-fisher-{digest.of_bytes(to_json(of).encode())[:8]}-"
    there = next((one for one in sorted(root.names()) if one.startswith(prefix) and committed(root / one)), "")
    # use a new folder for each try: another process may compute the same Fisher information at this moment
    target = root / (there or f"{prefix}{secrets.token_hex(4)}")
    config = config.override({"objective.anchor": target.url, "train.start_from": checkpoint})
    check_adapter(config)  # before the computation, which may take minutes
    if not there:
        write_fisher(Run(run), target.url, tokens, dataset, step_of(name), trust_code)
    return config
