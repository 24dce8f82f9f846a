"""The length of a run in epochs or steps, in place of ``train.total``."""

from __future__ import annotations

import math
from typing import Literal

from springtide import config as configs
from springtide.api.prepare import as_begun, prepare
from springtide.api.resolve import absolute
from springtide.config import Config
from springtide.dataset import Progress
from springtide.errors import ConfigError, explain
from springtide.run.folder import Run
from springtide.shards import TRAIN
from springtide.storage import Folder
from springtide.stream import open_data


def with_steps(config: Config, steps: int) -> Config:
    """Return ``config`` with the tokens of ``steps`` steps as ``train.total``. Raises ConfigError if that trains on nothing.

    Examples:
        >>> from springtide.api.length import with_steps
        >>> with_steps(st.recipes.tiny(), 20).num_steps
        20
    """
    if steps < 1:
        raise ConfigError(explain("--steps", steps, "trains on nothing", "give at least one step"))
    return config.override({"train.total": config.tokens_after(steps)})


def with_epochs(
    config: Config, epochs: float, resume: bool | Literal["auto"] = False, progress: Progress | None = None
) -> Config:
    """Return ``config`` with a ``train.total`` that reads its dataset ``epochs`` times, rounded up to whole steps.

    Prepares the dataset if needed. A run that resumes counts the rows of the dataset that it began with. Raises
    ``stream.max_epochs`` where it is less.

    Args:
        config: settings of the run.
        epochs: times that each row is read.
        resume: as for ``train``.
        progress: receives the progress of ``prepare``.

    Raises:
        ConfigError: ``epochs`` is not a positive number, or the run mixes several datasets.
        CorpusError: the corpus is missing, empty or too small.
    """
    if not (math.isfinite(epochs) and epochs > 0):
        raise ConfigError(explain("--epochs", epochs, "is not a number above 0", "give one, such as 3"))
    config = absolute(config)
    run = Run(Folder(config.run.root) / config.run.id) if resume and config.run.id else None
    if run is not None and run.folder.exists(configs.RUN_CONFIG):
        config, _ = as_begun(config, run.config)
    config = prepare(config, progress)
    data = open_data(config.data)
    if len(data.corpora) > 1:
        limit = (
            f"is not defined for a mixture of {len(data.corpora)} datasets, each of which is read as its weight says"
        )
        raise ConfigError(explain("--epochs", epochs, limit, "give --steps or --train.total"))
    rows = data.corpora[0].manifest.splits[TRAIN].rows
    config = config.override({"train.total": math.ceil(rows * epochs) * config.shards.sequence_length})
    (drawn,) = open_data(config.data).drawn(config.num_steps).values()
    return config.override({"stream.max_epochs": max(config.stream.max_epochs, math.ceil(drawn.epochs * 100) / 100)})
