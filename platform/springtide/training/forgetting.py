"""Forgetting: how much worse a run has become on the held-out sets of the run whose weights it starts from.

    forgetting of a held-out set = loss now - loss at step 0, on the same rows

The losses at step 0 belong to the weights that the run started from. They are stored in the run's checkpoints, so that every
later worker group can compute the difference. Below, the run whose weights this run starts from is the base run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from springtide import config as configs
from springtide.checkpoint.branch import split
from springtide.checkpoint.format import Meta, read_manifest
from springtide.config import Config
from springtide.config.data import WHOLE
from springtide.errors import CheckpointError, SpringtideError, redacted
from springtide.events import Evaluated
from springtide.shards import load_manifest
from springtide.storage import Folder
from springtide.stream import Data
from springtide.stream.corpora import open_corpora

_COMPONENT, _ROWS, _LOSSES = "forgetting", "rows", "losses"


@dataclasses.dataclass(frozen=True)
class FirstLosses:
    """Losses at step 0 on the held-out sets of the base run, the run whose weights this run starts from; empty without a base
    run."""

    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    """Held-out set -> loss [nats per token]."""
    rows: int = 0
    """Total number of rows in the evaluation at step 0. Evaluations with another number of rows cannot be compared with it."""

    @classmethod
    def of(cls, config: Config, data: Data, found: Evaluated) -> FirstLosses:
        """Return the losses of ``found``, the evaluation before the first step of a run of ``config``."""
        names = old_names(config, data)
        return cls({name: found.losses[name] for name in names if name in found.losses}, found.rows)

    @classmethod
    def in_state(cls, meta: Meta) -> FirstLosses:
        """Return the losses at step 0 that a checkpoint's metadata contains; empty if it contains no valid losses."""
        found = meta.components.get(_COMPONENT)
        losses, rows = (found.get(_LOSSES), found.get(_ROWS)) if isinstance(found, dict) else (None, None)
        if not isinstance(losses, dict) or not isinstance(rows, int):
            return cls()
        kept = {name: float(loss) for name, loss in losses.items() if isinstance(loss, int | float)}
        return cls({name: loss for name, loss in kept.items() if math.isfinite(loss)}, rows)

    @property
    def components(self) -> dict[str, Any]:
        """Return these losses as an entry of ``Meta.components``, the metadata of a checkpoint; empty without losses."""
        return {_COMPONENT: {_LOSSES: self.losses, _ROWS: self.rows}} if self.losses else {}

    def compared(self, found: Evaluated) -> Evaluated:
        """Return the evaluation ``found`` with the forgetting of each set added: its loss now minus its loss at step 0 [nats
        per token]."""
        if found.rows != self.rows:
            return found
        worse = {name: found.losses[name] - loss for name, loss in self.losses.items() if name in found.losses}
        return dataclasses.replace(found, forgetting=worse)


def with_old_sets(config: Config) -> tuple[Config, list[str]]:
    """Return ``config`` with the held-out sets of the base run (whose weights this run starts from) added to
    ``stream.eval_datasets``. Sets that the run evaluates already are not added. Also return remarks for the user about sets
    that cannot be evaluated. The config of a branch (``start_with = state``) is unchanged, because it has the held-out sets of
    the run that it continues."""
    if not config.train.start_from or config.train.start_with == "state" or not config.train.eval_tokens:
        return config, []
    remarks: list[str] = []
    known = {load_manifest(Folder(url)).digest for url in _urls(config).values()}
    name_of_run = split(config.train.start_from)[0].name
    for name, url in _urls(_saved(config)).items():
        try:
            digest = load_manifest(Folder(url)).digest
            if digest in known:
                continue
            name = name_of_run if name == WHOLE else name
            while name in _urls(config):
                name = f"{name_of_run}-{name}"
            sets = {**config.stream.eval_datasets, name: url}
            changed = config.override({"stream.eval_datasets": sets})
            if any(one.holds_out and one.dataset == name for one in open_corpora(changed.data)[1]):
                config, known = changed, {*known, digest}
        except (SpringtideError, OSError) as error:
            remarks.append(f"what this run forgets of {redacted(url)} is not measured: {redacted(str(error))[:500]}")
    return config, remarks


def old_names(config: Config, data: Data) -> list[str]:
    """Return the names of the held-out sets of ``data`` that come from the base run, the run whose weights a run of ``config``
    starts from."""
    if not config.train.start_from or config.train.start_with == "state":
        return []
    digests = set(_digests(_saved(config)))
    return [one.name for one in data.heldout if one.identity.partition("/")[0] in digests]


def _saved(config: Config) -> Config | None:
    """Return the config in the checkpoint that a run of ``config`` starts from. None if the checkpoint cannot be read, or has
    no config. A user's own training loop may save checkpoints without a config."""
    try:
        saved = read_manifest(*split(config.train.start_from)).config
    except CheckpointError:  # ``start_check`` reports this error when the run starts from the checkpoint
        return None
    return configs.build_stored(saved) if saved else None


def _urls(config: Config | None) -> dict[str, str]:
    """Return the URLs of the datasets that a run of ``config`` trains on or evaluates, by name."""
    if config is None:
        return {}
    datasets = config.stream.mixture or {WHOLE: config.shards.dataset}
    return {name: url for name, url in {**datasets, **config.stream.eval_datasets}.items() if url}


def _digests(config: Config | None) -> Iterator[str]:
    for url in _urls(config).values():
        try:
            yield load_manifest(Folder(url)).digest
        except (SpringtideError, OSError):  # the dataset cannot be read, so this run does not evaluate it either
            continue
