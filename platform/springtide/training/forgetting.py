"""What a run forgets of the run whose weights it starts from.

    held-out sets of the run before -> evaluated in this one, too -> loss now - loss at step 0, of the same rows

The losses at step 0 are those of the weights that the run started from. They travel in its checkpoints, so that every
evaluation can tell the difference, whichever worker group makes it.
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
    """Held-out losses at step 0 of the sets that the run before had; empty in a run that starts from none."""

    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    """Nats per token of each set."""
    rows: int = 0
    """Rows of all sets in that evaluation: another number of rows is not compared."""

    @classmethod
    def of(cls, config: Config, data: Data, found: Evaluated) -> FirstLosses:
        """Return the losses of the evaluation ``found``, made before the first step of a run of ``config``."""
        names = old_names(config, data)
        return cls({name: found.losses[name] for name in names if name in found.losses}, found.rows)

    @classmethod
    def in_state(cls, meta: Meta) -> FirstLosses:
        """Return those of a checkpoint; empty if it has none that make sense."""
        found = meta.components.get(_COMPONENT)
        losses, rows = (found.get(_LOSSES), found.get(_ROWS)) if isinstance(found, dict) else (None, None)
        if not isinstance(losses, dict) or not isinstance(rows, int):
            return cls()
        kept = {name: float(loss) for name, loss in losses.items() if isinstance(loss, int | float)}
        return cls({name: loss for name, loss in kept.items() if math.isfinite(loss)}, rows)

    @property
    def components(self) -> dict[str, Any]:
        """``Meta.components`` of a checkpoint."""
        return {_COMPONENT: {_LOSSES: self.losses, _ROWS: self.rows}} if self.losses else {}

    def compared(self, found: Evaluated) -> Evaluated:
        """Return the evaluation with how much each set got worse."""
        if found.rows != self.rows:
            return found
        worse = {name: found.losses[name] - loss for name, loss in self.losses.items() if name in found.losses}
        return dataclasses.replace(found, forgetting=worse)


def with_old_sets(config: Config) -> tuple[Config, list[str]]:
    """Return ``config`` with the held-out sets of the run whose weights it starts from among ``stream.eval_datasets``, unless
    they are evaluated anyway; and remarks for the user on those that cannot be. A branch has those of its trunk."""
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
    """Return the names of the held-out sets of ``data`` that the run whose weights a run of ``config`` starts from had."""
    if not config.train.start_from or config.train.start_with == "state":
        return []
    digests = set(_digests(_saved(config)))
    return [one.name for one in data.heldout if one.identity.partition("/")[0] in digests]


def _saved(config: Config) -> Config | None:
    """Return the config of the run before; None if there is none: a training loop of your own saves none."""
    try:
        saved = read_manifest(*split(config.train.start_from)).config
    except CheckpointError:  # told where the run is to begin with it
        return None
    return configs.build_stored(saved) if saved else None


def _urls(config: Config | None) -> dict[str, str]:
    """Return the datasets that a run trains on or evaluates, by name."""
    if config is None:
        return {}
    datasets = config.stream.mixture or {WHOLE: config.shards.dataset}
    return {name: url for name, url in {**datasets, **config.stream.eval_datasets}.items() if url}


def _digests(config: Config | None) -> Iterator[str]:
    for url in _urls(config).values():
        try:
            yield load_manifest(Folder(url)).digest
        except (SpringtideError, OSError):  # it is gone: then it is not evaluated here either
            continue
