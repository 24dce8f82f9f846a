"""A run that begins with a checkpoint of another: with its state, at its step (a branch), or with its weights alone.

The checkpoint is read where it lies, at any world size (``load.begin``). The other run keeps it from then on: until the branch
has one of its own, it begins here again.
"""

from __future__ import annotations

from springtide import config as configs
from springtide.checkpoint.format import Identity, committed, name_of, of_another_order, read_manifest, step_of
from springtide.checkpoint.retention import hold
from springtide.config import RUN_CONFIG, Config
from springtide.config.schema import TrainConfig
from springtide.errors import CheckpointError, ConfigError, explain
from springtide.store import Folder

FIELD = "train.start_from"
_SAME_FUNCTION = ("model.init_seed", "model.max_sequence_length")
"""What a model may differ in and still compute the same from the same weights."""


def resolve(url: str, known: str) -> str:
    """The URL of the checkpoint that ``url`` means: itself, or the newest of the run it names; ``known`` where that is one of
    the same run, so that one who goes on means the one that was begun with. ConfigError when there is none."""
    run, name = split(url)
    if not name and known and split(known)[0] == run:
        return known
    names = committed(run)
    name = name or (names or [""])[-1]
    if name not in names:
        there = ", ".join(names[-3:]) or "none"
        raise ConfigError(explain(FIELD, url, f"names no checkpoint that counts; {run.url} has {there}", "name one"))
    return f"{run.url}/checkpoints/{name}"


def prepare(config: Config, identity: Identity, tokenizer_digest: str) -> Config:
    """See that a run of ``config`` can begin with the checkpoint it names, and have that kept; returns the config that it was
    saved under. ConfigError when it cannot.

    Args:
        identity: of the order of this run's data.
        tokenizer_digest: of this run's data; with another vocabulary the weights of a checkpoint mean nothing.
    """
    url = config.train.start_from
    run, name = split(url)
    try:
        manifest = read_manifest(run, name)
    except CheckpointError as error:
        raise ConfigError(explain(FIELD, url, f"cannot be used: {error}", "name another checkpoint")) from None
    meta, weights_only = manifest.meta, config.train.start_with == "weights"
    if not weights_only and (problem := of_another_order(run, meta, identity)):
        raise ConfigError(
            explain(FIELD, url, problem, "or train.start_with = weights, to begin at step 0 of this order")
        )
    if not weights_only and meta.step >= config.num_steps:
        end = f"is of step {meta.step}, and train.total ends at step {config.num_steps}"
        raise ConfigError(explain(FIELD, url, end, "raise train.total"))
    saved = configs.build(manifest.config)
    if meta.tokenizer_digest not in ("", tokenizer_digest):
        dataset = next(iter(saved.stream.mixture.values()), saved.shards.dataset)
        other = f"was trained with the vocabulary {meta.tokenizer_digest}, this run's data has {tokenizer_digest}"
        remedy = f"prepare the new text with corpus.tokenizer = {dataset}/tokenizer.json"
        raise ConfigError(explain(FIELD, url, other, remedy))
    hold(run, name, config.run.id)
    return saved


def remarks(saved: Config, config: Config) -> list[str]:
    """What a person should know of a run of ``config`` that begins with a checkpoint saved under ``saved``: settings that have
    its weights compute something else. Those that change a shape are refused when it is loaded."""
    return [
        f"{name} was {before!r} in {config.train.start_from} and is {after!r} here: its weights compute something else"
        for name, (before, after) in configs.difference(saved, config).items()
        if name.startswith("model.") and name not in _SAME_FUNCTION
    ]


def first_step(config: TrainConfig) -> int:
    """Steps done when a run of ``config`` begins."""
    branches = config.start_from and config.start_with == "state"
    return (step_of(split(config.start_from)[1]) or 0) if branches else 0


def lineage(config: Config) -> list[str]:
    """URLs of the checkpoints that a run of ``config`` descends from, the last one first; as far as their runs are there."""
    found: list[str] = []
    url = config.train.start_from
    while url and url not in found:
        found.append(url)
        run = split(url)[0]
        url = configs.parse(run.read(RUN_CONFIG)).train.start_from if run.exists(RUN_CONFIG) else ""
    return found


def split(url: str) -> tuple[Folder, str]:
    """The run of a checkpoint, and the name of its checkpoint; empty where ``url`` is the run's."""
    folder = Folder(url)
    if step_of(folder.name) is None:
        return folder, ""
    return Folder(folder.url.rsplit("/", 2)[0]), name_of(step_of(folder.name) or 0)
