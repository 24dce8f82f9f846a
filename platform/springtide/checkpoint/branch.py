"""Start a run from a checkpoint of another run: with its state, at its step (a branch), with its weights and optimizer at
step 0 of other rows (a stage), or with its weights only.

The checkpoint is read in place, at any world size (``restore.begin``). The other run then keeps it for good: until the
branch has a checkpoint of its own, every restart begins here.
"""

from __future__ import annotations

from typing import Any

from springtide import config as configs
from springtide.checkpoint.format import Manifest, Meta, committed, name_of, step_of
from springtide.checkpoint.retention import hold
from springtide.config.schema import TrainConfig
from springtide.config.steps import StepsDone
from springtide.errors import ConfigError, explain
from springtide.storage import Folder

FIELD = "train.start_from"
_COMPONENT, _TOKENS, _LOSS_SCALE = "stages_before", "tokens", "loss_scale"


def resolve(url: str, known: str, field: str = FIELD) -> str:
    """Return the URL of the checkpoint that ``url`` means: itself, or the newest of the run that it names. ``known``,
    the checkpoint that this run began with, is returned instead if it is of that run. ``field`` names it. Raises ConfigError if
    there is none."""
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
    """Have the other run keep the checkpoint ``url``, which the run ``run_id`` names in ``field``. Raises ConfigError if that
    run has removed it meanwhile."""
    run, name = split(url)
    hold(run, name, run_id)
    if name not in committed(run):  # it looks for such notes once more after it has taken a mark away
        gone = "names a checkpoint that its run has removed since"
        raise ConfigError(explain(field, url, gone, "name a newer one"))


def first_step(config: TrainConfig) -> StepsDone:
    """Return the steps done when a run of ``config`` begins."""
    branches = config.start_from and config.start_with == "state"
    return (step_of(split(config.start_from)[1]) if branches else None) or StepsDone(0)


def meta_of_start(config: TrainConfig, manifest: Manifest) -> Meta:
    """Return the metadata of the state that a run begins with, which has loaded its tensors from the checkpoint of
    ``manifest``. A stage goes on from the chain, with the loss scale, and with what averages count of the past."""
    meta = manifest.meta
    if config.start_with == "state":
        return meta.model_copy(update={"metrics": {}})
    anew: dict[str, Any] = {"step": 0, "tokens": 0, "skipped_updates": (), "metrics": {}}
    if config.start_with == "weights":
        return meta.model_copy(update={**anew, "chain": "", "components": {}})
    # a training loop of your own saves no config
    in_run = configs.build_stored(manifest.config).tokens_after(meta.step) if manifest.config else meta.tokens
    tokens = tokens_before(meta) + in_run
    kept = {name: value for name, value in meta.components.items() if name == _LOSS_SCALE}
    return meta.model_copy(update={**anew, "components": kept | components_of(tokens)})


def components_of(tokens: int) -> dict[str, Any]:
    """Return ``Meta.components`` for ``tokens`` trained on before step 0; empty for none."""
    return {_COMPONENT: {_TOKENS: tokens}} if tokens else {}


def tokens_before(meta: Meta) -> int:
    """Return the tokens that the optimizer of this state was trained on before step 0 of its run, in runs before it."""
    found = meta.components.get(_COMPONENT)
    tokens = found.get(_TOKENS) if isinstance(found, dict) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else 0


def split(url: str) -> tuple[Folder, str]:
    """Return the run and the name of the checkpoint ``url``; the name is empty if ``url`` is a run."""
    folder = Folder(url)
    if step_of(folder.name) is None:
        return folder, ""
    return Folder(folder.url.rsplit("/", 2)[0]), name_of(step_of(folder.name) or StepsDone(0))
