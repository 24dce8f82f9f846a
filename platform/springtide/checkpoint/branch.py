"""Start a run from a checkpoint of another run: with its state, at its step (a branch), or with its weights only.

The checkpoint is read in place, at any world size (``restore.begin``). The other run then keeps it for good: until the
branch has a checkpoint of its own, every restart begins here.
"""

from __future__ import annotations

from springtide import config as configs
from springtide.checkpoint.format import Identity, committed, name_of, of_another_order, read_manifest, step_of
from springtide.checkpoint.retention import hold
from springtide.config import RUN_CONFIG, Config
from springtide.config.schema import TrainConfig
from springtide.config.steps import StepsDone
from springtide.errors import CheckpointError, ConfigError, explain
from springtide.store import Folder

FIELD = "train.start_from"
_SAME_FUNCTION = ("model.init_seed", "model.max_sequence_length")
"""Model settings that do not change what the same weights compute."""


def resolve(url: str, known: str) -> str:
    """Return the URL of the checkpoint that ``url`` means: itself, or the newest of the run that it names. ``known``,
    the checkpoint that this run began with, is returned instead if it is of that run. Raises ConfigError if there is
    none."""
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
    """Check that a run of ``config`` can begin with the checkpoint that it names, and have that checkpoint kept.
    Returns the config that it was saved with. Raises ConfigError if the run cannot begin with it.

    Args:
        identity: of this run's data order.
        tokenizer_digest: of this run's data; the weights of a checkpoint are useless with another tokenizer.
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
        other = f"was trained with the tokenizer {meta.tokenizer_digest}, this run's data has {tokenizer_digest}"
        remedy = f"prepare the new text with corpus.tokenizer = {dataset}/tokenizer.json"
        raise ConfigError(explain(FIELD, url, other, remedy))
    hold(run, name, config.run.id)
    return saved


def remarks(saved: Config, config: Config) -> list[str]:
    """Return remarks for the user of a run of ``config`` that begins with a checkpoint saved with ``saved``: one for
    each model setting that makes its weights compute something else. Loading refuses settings that change a shape."""
    return [
        f"{name} was {before!r} in {config.train.start_from} and is {after!r} here: its weights compute something else"
        for name, (before, after) in configs.difference(saved, config).items()
        if name.startswith("model.") and name not in _SAME_FUNCTION
    ]


def first_step(config: TrainConfig) -> StepsDone:
    """Return the steps done when a run of ``config`` begins."""
    branches = config.start_from and config.start_with == "state"
    return (step_of(split(config.start_from)[1]) if branches else None) or StepsDone(0)


def lineage(config: Config) -> list[str]:
    """Return the URLs of the checkpoints that a run of ``config`` descends from, latest first, as far as their runs exist."""
    found: list[str] = []
    url = config.train.start_from
    while url and url not in found:
        found.append(url)
        run = split(url)[0]
        url = configs.parse(run.read(RUN_CONFIG)).train.start_from if run.exists(RUN_CONFIG) else ""
    return found


def split(url: str) -> tuple[Folder, str]:
    """Return the run and the name of the checkpoint ``url``; the name is empty if ``url`` is a run."""
    folder = Folder(url)
    if step_of(folder.name) is None:
        return folder, ""
    return Folder(folder.url.rsplit("/", 2)[0]), name_of(step_of(folder.name) or StepsDone(0))
