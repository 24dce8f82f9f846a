"""``st.prepare``: find the dataset of a config, or make it."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

import numpy as np

from springtide import config as configs
from springtide.config import Config
from springtide.config.fields import is_free
from springtide.dataset import Progress, in_process, make_dataset, open_dataset, rows_text, silent, units_to_make
from springtide.dataset.make import dataset_folder
from springtide.errors import ConfigError, SpringtideError, explain, in_one_line, redacted
from springtide.run.report import dataset_page
from springtide.shards import HELDOUT, MANIFEST, TRAIN, SplitReader
from springtide.storage import Folder

_LARGE_UNITS = 8
_CARD_ROWS = 3
_DATA = ("corpus.", "shards.")
CARD = "card.html"


def prepare(config: Config, progress: Progress | None = None) -> Config:
    """Find the dataset that ``config`` describes, or make it from its corpus.

    A small corpus is prepared in this process. A larger one is prepared by Ray Data tasks, if Ray is installed, on the cluster
    that training would use. If a prepare is killed, the next call resumes where it stopped.

    Args:
        config: settings; the sections ``corpus`` and ``shards`` determine the contents of the dataset.
        progress: called with the name of a stage, its number of finished jobs, and its number of all jobs.

    Returns:
        The config with the dataset's URL filled in, as ``shards.dataset`` or for the empty URLs in ``stream.mixture``. It is
        unchanged if the config names all its datasets already.

    Raises:
        ConfigError: a setting cannot work, such as a folder that cannot be written, or ``shards.dataset`` together with a
            mixture that has an empty URL.
        CorpusError: the corpus is missing, empty or too small.

    Examples:
        >>> st.prepare(st.recipes.tiny()).shards.dataset
        '/.../datasets/...'
    """
    mixture = config.stream.mixture
    if (mixture and "" not in mixture.values()) or (config.shards.dataset and not mixture):
        return config
    # refuse this case: it is unclear whether shards.dataset belongs to the mixture, or is left over from an earlier config
    if config.shards.dataset:
        empty = ", ".join(name for name, url in mixture.items() if not url)
        problem = f"is set, and stream.mixture leaves {empty} empty, which is prepared from the corpus"
        remedy = f"name the dataset of {empty} in stream.mixture, or leave shards.dataset empty"
        raise ConfigError(explain("shards.dataset", config.shards.dataset, problem, remedy))
    corpus, shards, progress = config.corpus, config.shards, progress or silent
    units = units_to_make(corpus, shards)
    if units <= _LARGE_UNITS or importlib.util.find_spec("ray") is None:
        url = make_dataset(corpus, shards, progress, in_process)
    else:
        from springtide.ray.cluster.session import cluster
        from springtide.ray.data.prepare import ray_map

        with cluster(config, dashboard=False):
            url = make_dataset(corpus, shards, progress, ray_map)
    if units:
        write_card(url)
    elif not Folder(url).exists(CARD):  # the call that sealed the dataset was killed before it wrote the card
        with contextlib.suppress(OSError):  # another user's dataset may be read-only: leave it without a card
            write_card(url)
    if mixture:
        return config.override({"stream.mixture": {name: known or url for name, known in mixture.items()}})
    return config.override({"shards.dataset": url})


def as_begun(config: Config, before: Config) -> tuple[Config, list[str]]:
    """Fill in the sealed (complete) datasets that a run began with, so that a resumed run reads the same datasets even if the
    files of its corpus have changed since.

    Args:
        config: settings that the user gives now. If they name a dataset, or a corpus with other settings, nothing is filled in.
        before: the run's stored settings, which name its datasets.

    Returns:
        The config, and remarks for the user on a corpus that has changed since. If a dataset no longer exists, nothing is
        filled in, so that it is prepared again.
    """
    mixture, known = config.stream.mixture, before.stream.mixture
    if config.shards.dataset or _of_datasets(config) != _of_datasets(before):
        return config, []
    changes: dict[str, Any] = {}
    if mixture:
        changes["stream.mixture"] = {name: url or known.get(name, "") for name, url in mixture.items()}
    elif known:
        changes["stream.mixture"] = known
        changes["stream.weights"] = config.stream.weights or before.stream.weights
    else:
        changes["shards.dataset"] = before.shards.dataset
    filled = config.override(changes)
    new = {*filled.stream.mixture.values(), filled.shards.dataset} - {*mixture.values(), ""}
    if filled == config or not all(Folder(url).exists(MANIFEST) for url in new):
        return config, []
    return filled, _remarks_on_corpus(config, new)


def _of_datasets(config: Config) -> str:
    """Return, as text, all settings that determine a dataset prepared from a corpus. The text does not depend on the contents
    of the corpus's files."""
    settings = configs.flatten(config)
    return redacted(repr([(name, settings[name]) for name in settings if name.startswith(_DATA) and not is_free(name)]))


def _remarks_on_corpus(config: Config, datasets: set[str]) -> list[str]:
    """Check whether preparing the corpus now would produce one of the run's ``datasets`` (URLs). If not, or if the corpus
    cannot be read, return one remark for the user; else an empty list."""
    keeps = f"the run keeps reading the dataset that it began with, {', '.join(sorted(datasets))}"
    try:
        if dataset_folder(config.corpus, config.shards).name in {Folder(url).name for url in datasets}:
            return []
    except (SpringtideError, OSError) as error:
        return [f"corpus.source cannot be read now ({in_one_line(error)}): {keeps}"]
    return [f"corpus.source makes another dataset now: {keeps}"]


def write_card(url: str) -> str:
    """Write ``card.html`` into a sealed (complete) dataset: its source, what was dropped, a few rows. Returns the path or URL
    of the card."""
    manifest, vocabulary = open_dataset(url)
    split = HELDOUT if manifest.is_eval_only else TRAIN
    rows = SplitReader(Folder(url), manifest, split).read(np.arange(min(_CARD_ROWS, manifest.splits[split].rows)))
    texts = list(rows_text(rows.tokens, vocabulary))
    page = dataset_page.render(f"Dataset {Folder(url).name}", manifest.model_dump(mode="json"), manifest.digest, texts)
    Folder(url).write(CARD, page)
    return Folder(url).where(CARD)
