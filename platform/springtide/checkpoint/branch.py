"""Start a run from a checkpoint of another run, in one of three ways (``train.start_with``).

    state      a branch: take the whole state and continue at the checkpoint's step
    optimizer  a stage: take the weights and the optimizer state, and start at step 0 of other data
    weights    take the weights only, and start at step 0

The checkpoint is read from the other run's folder, at any world size (``restore.begin``). A note in that folder protects the
checkpoint from deletion, because each restart loads it again until the new run has committed a checkpoint of its own.
"""

from __future__ import annotations

from typing import Any

from springtide import config as configs
from springtide.checkpoint.format import Manifest, Meta, committed, name_of, step_of
from springtide.checkpoint.retention import hold, release
from springtide.config.schema import TrainConfig
from springtide.config.steps import StepsDone
from springtide.errors import ConfigError, explain
from springtide.storage import Folder

FIELD = "train.start_from"
_COMPONENT, _TOKENS, _LOSS_SCALE = "stages_before", "tokens", "loss_scale"


def resolve(url: str, known: str, field: str = FIELD) -> str:
    """Return the URL of the checkpoint that ``url`` names: the checkpoint itself, or the newest checkpoint of a run.

    ``known``: URL of the checkpoint that this run began with, empty if this run is new. If ``url`` is the folder of the run
    that ``known`` belongs to, ``known`` is returned: a restart must not switch to a newer checkpoint. ``field``: the config
    field that holds ``url``, for errors. Raises ConfigError unless the checkpoint exists, is committed, and is neither
    abandoned nor quarantined.
    """
    run, name = split(url)
    if not name and known and split(known)[0] == run:
        return known
    names = committed(run)
    name = name or (names or [""])[-1]
    if name not in names:
        there = ", ".join(names[-3:]) or "none"
        raise ConfigError(explain(field, url, f"names no checkpoint that counts; {run.url} has {there}", "name one"))
    return f"{run.url}/checkpoints/{name}"


def keep(url: str, run_id: str, field: str = FIELD) -> None:
    """Protect the checkpoint ``url`` of another run from deletion, because the run ``run_id`` starts from it. Raises
    ConfigError if the other run has removed the checkpoint meanwhile. ``field``: the config field that holds ``url``, for
    errors."""
    run, name = split(url)
    hold(run, name, run_id)
    # no race with the removal of checkpoints: after ``commit.tidy`` has removed a commit marker, it reads the notes again, and
    # restores the marker of a checkpoint that has a new note
    if name not in committed(run):
        release(run, name, run_id)
        gone = "names a checkpoint that its run has removed since"
        raise ConfigError(explain(field, url, gone, "name a newer one"))


def first_step(config: TrainConfig) -> StepsDone:
    """Return the number of steps done when a run of ``config`` begins: the checkpoint's step for a branch, else 0."""
    branches = config.start_from and config.start_with == "state"
    return (step_of(split(config.start_from)[1]) if branches else None) or StepsDone(0)


def meta_of_start(config: TrainConfig, manifest: Manifest) -> Meta:
    """Return the metadata with which a run of ``config`` begins. ``manifest``: manifest of the checkpoint that it starts from.

    A stage (weights and optimizer state, at step 0 of other data) keeps three facts: the chain (hash over all trained steps),
    the loss scale, and the number of tokens trained before, which weight averaging needs.
    """
    meta = manifest.meta
    if config.start_with == "state":
        return meta.model_copy(update={"metrics": {}})
    anew: dict[str, Any] = {"step": 0, "tokens": 0, "skipped_updates": (), "metrics": {}}
    if config.start_with == "weights":
        return meta.model_copy(update={**anew, "chain": "", "components": {}})
    # a checkpoint of a user's own training loop has no config
    in_run = configs.build_stored(manifest.config).tokens_after(meta.step) if manifest.config else meta.tokens
    tokens = tokens_before(meta) + in_run
    kept = {name: value for name, value in meta.components.items() if name == _LOSS_SCALE}
    return meta.model_copy(update={**anew, "components": kept | components_of(tokens)})


def components_of(tokens: int) -> dict[str, Any]:
    """Return an entry for ``Meta.components`` with ``tokens``, the number of tokens that earlier runs trained on; empty for
    0."""
    return {_COMPONENT: {_TOKENS: tokens}} if tokens else {}


def tokens_before(meta: Meta) -> int:
    """Return how many tokens earlier runs trained on, before step 0 of the run that saved ``meta``."""
    found = meta.components.get(_COMPONENT)
    tokens = found.get(_TOKENS) if isinstance(found, dict) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else 0


def split(url: str) -> tuple[Folder, str]:
    """Split ``url`` into the folder of a run and the name of a checkpoint; the name is empty if ``url`` is a run's folder."""
    folder = Folder(url)
    if step_of(folder.name) is None:
        return folder, ""
    return Folder(folder.url.rsplit("/", 2)[0]), name_of(step_of(folder.name) or StepsDone(0))
