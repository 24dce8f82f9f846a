"""``st.prepare``: the dataset of a config, found or made."""

from __future__ import annotations

import contextlib
import importlib.util

import numpy as np

from springtide.config import Config
from springtide.dataset import Progress, in_process, make_dataset, open_dataset, rows_text, silent, units_to_make
from springtide.errors import ConfigError, explain
from springtide.report import dataset_page
from springtide.shards import HELDOUT, TRAIN, SplitReader
from springtide.store import Folder

_LARGE_UNITS = 8
_CARD_ROWS = 3
CARD = "card.html"


def prepare(config: Config, progress: Progress | None = None) -> Config:
    """Find the dataset of ``config`` or make it.

    A small corpus is prepared in this process, a larger one by Ray Data tasks on the cluster that training would use, if Ray is
    installed. A killed prepare resumes where it stopped.

    Args:
        config: settings; ``corpus`` and ``shards`` decide what the dataset holds.
        progress: receives the name of a stage, the number of its jobs done, and the number of its jobs in all.

    Returns:
        The config with ``shards.dataset``, or what ``stream.mixture`` leaves empty, filled in; unchanged if it names its
        datasets.

    Raises:
        ConfigError: a setting cannot work, such as a folder that cannot be written, or ``shards.dataset`` beside a mixture with
            an empty name.
        CorpusError: the corpus is missing, empty or too small.

    Examples:
        >>> st.prepare(st.recipes.tiny()).shards.dataset
        '/.../datasets/...'
    """
    mixture = config.stream.mixture
    if (mixture and "" not in mixture.values()) or (config.shards.dataset and not mixture):
        return config
    if config.shards.dataset:  # it may be the old one, of the config that this one was made from
        empty = ", ".join(name for name, url in mixture.items() if not url)
        problem = f"is set, and stream.mixture leaves {empty} empty, which is prepared from the corpus"
        remedy = f"name the dataset of {empty} in stream.mixture, or leave shards.dataset empty"
        raise ConfigError(explain("shards.dataset", config.shards.dataset, problem, remedy))
    corpus, shards, progress = config.corpus, config.shards, progress or silent
    units = units_to_make(corpus, shards)
    if units <= _LARGE_UNITS or importlib.util.find_spec("ray") is None:
        url = make_dataset(corpus, shards, progress, in_process)
    else:
        from springtide.on_ray.cluster.session import cluster
        from springtide.on_ray.data.prepare import ray_map

        with cluster(config, dashboard=False):
            url = make_dataset(corpus, shards, progress, ray_map)
    if units:
        write_card(url)
    elif not Folder(url).exists(CARD):  # the call that sealed it was killed
        with contextlib.suppress(OSError):  # it may be another user's
            write_card(url)
    if mixture:
        return config.override({"stream.mixture": {name: known or url for name, known in mixture.items()}})
    return config.override({"shards.dataset": url})


def write_card(url: str) -> str:
    """Write ``card.html`` into a sealed dataset: its source, what was dropped, a few rows; returns its path or URL."""
    manifest, vocabulary = open_dataset(url)
    split = HELDOUT if manifest.is_eval_only else TRAIN
    rows = SplitReader(Folder(url), manifest, split).read(np.arange(min(_CARD_ROWS, manifest.splits[split].rows)))
    texts = list(rows_text(rows.tokens, vocabulary))
    page = dataset_page.render(f"Dataset {Folder(url).name}", manifest.model_dump(mode="json"), manifest.digest, texts)
    Folder(url).write(CARD, page)
    return Folder(url).where(CARD)
