"""A config whose dataset is made in this process, for tests of what reads it."""

from __future__ import annotations

from springtide.config import Config
from springtide.dataset import Map, in_process, make_dataset, silent


def prepare(config: Config, run: Map = in_process) -> Config:
    """Return ``config`` with its dataset, found or made."""
    return config.override({"shards.dataset": make_dataset(config.corpus, config.shards, silent, run)})
