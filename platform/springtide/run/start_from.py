"""Whether a run can start from a checkpoint of another run, and what its user should know then."""

from __future__ import annotations

from springtide import config as configs
from springtide.checkpoint.branch import FIELD, split
from springtide.checkpoint.format import Identity, read_manifest
from springtide.checkpoint.other_orders import of_another_order
from springtide.config import RUN_CONFIG, Config
from springtide.errors import CheckpointError, ConfigError, explain

_SAME_FUNCTION = ("model.init_seed", "model.max_sequence_length")
"""Model settings that do not change what the same weights compute."""


def check_start(config: Config, identity: Identity, tokenizer_digest: str) -> Config:
    """Check that a run of ``config`` can begin with the checkpoint that it names. Returns the config that it was saved with.
    Raises ConfigError if the run cannot begin with it.

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
    return saved


def remarks_on(saved: Config, config: Config) -> list[str]:
    """Return remarks for the user of a run of ``config`` that begins with a checkpoint saved with ``saved``: one for
    each model setting that makes its weights compute something else. Loading refuses settings that change a shape."""
    return [
        f"{name} was {before!r} in {config.train.start_from} and is {after!r} here: its weights compute something else"
        for name, (before, after) in configs.difference(saved, config).items()
        if name.startswith("model.") and name not in _SAME_FUNCTION
    ]


def lineage(config: Config) -> list[str]:
    """Return the URLs of the checkpoints that a run of ``config`` descends from, latest first, as far as their runs exist."""
    found: list[str] = []
    url = config.train.start_from
    while url and url not in found:
        found.append(url)
        run = split(url)[0]
        url = (
            configs.parse(run.read(RUN_CONFIG), run.where(RUN_CONFIG)).train.start_from
            if run.exists(RUN_CONFIG)
            else ""
        )
    return found
