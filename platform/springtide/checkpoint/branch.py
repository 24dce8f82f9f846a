"""Start a run from a checkpoint of another run, in one of three ways (``train.start_with``).

A branch takes the whole state and continues at the checkpoint's step. A stage takes the weights and the optimizer state, and
starts at step 0 of other data. The third way takes the weights only.

The checkpoint is read from the other run's folder, at any world size (``restore.begin``). The other run then never removes it:
until the new run has committed a checkpoint, each of its restarts begins from there.
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

    ``known``: the checkpoint that this run began with; returned if ``url`` is the run that it belongs to. ``field``: the config
    field that holds ``url``, for errors. Raises ConfigError if there is no such checkpoint that is committed and neither
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
    """Have the other run keep the checkpoint ``url``, which the run ``run_id`` names in ``field``. Raises ConfigError if the
    other run has removed the checkpoint meanwhile."""
    run, name = split(url)
    hold(run, name, run_id)
    # no race: ``commit.tidy`` reads the notes again after it has removed a commit marker, and restores the marker
    if name not in committed(run):
        release(run, name, run_id)
        gone = "names a checkpoint that its run has removed since"
        raise ConfigError(explain(field, url, gone, "name a newer one"))


def first_step(config: TrainConfig) -> StepsDone:
    """Return the steps done when a run of ``config`` begins."""
    branches = config.start_from and config.start_with == "state"
    return (step_of(split(config.start_from)[1]) if branches else None) or StepsDone(0)


def meta_of_start(config: TrainConfig, manifest: Manifest) -> Meta:
    """Return the metadata of the state that a run begins with, after it has loaded the tensors of the checkpoint of
    ``manifest``. A stage keeps the chain, the loss scale, and the number of tokens trained before, which weight
    averaging needs."""
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
    """Return the entry of ``Meta.components`` that stores the ``tokens`` trained on in earlier runs; empty for 0 tokens."""
    return {_COMPONENT: {_TOKENS: tokens}} if tokens else {}


def tokens_before(meta: Meta) -> int:
    """Return the number of tokens that the optimizer of this state was trained on in earlier runs, before step 0 of its run."""
    found = meta.components.get(_COMPONENT)
    tokens = found.get(_TOKENS) if isinstance(found, dict) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else 0


def split(url: str) -> tuple[Folder, str]:
    """Return the folder of the run and the name of the checkpoint in ``url``; the name is empty if ``url`` is a run."""
    folder = Folder(url)
    if step_of(folder.name) is None:
        return folder, ""
    return Folder(folder.url.rsplit("/", 2)[0]), name_of(step_of(folder.name) or StepsDone(0))
