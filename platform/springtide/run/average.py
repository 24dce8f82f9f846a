"""The mean of a run's newest checkpoints, as a run's folder of its own."""

from __future__ import annotations

import contextlib

from springtide import config as configs
from springtide.checkpoint.average import average_checkpoints
from springtide.checkpoint.format import committed
from springtide.checkpoint.retention import note_reader
from springtide.config import RUN_CONFIG
from springtide.errors import ConfigError, explain
from springtide.run.folder import Run
from springtide.storage import Folder


def average(run: Run, to: str, last: int, ema: bool) -> Run:
    """As ``Run.average``."""
    names, folder = run.checkpoints, Folder(to)
    if not 0 < last <= len(names):
        limit = f"{run.folder.url} has {len(names)} checkpoints that count"
        raise ConfigError(explain("last", last, limit, "keep more of them: checkpoint.keep_last, keep_every"))
    if folder.exists(RUN_CONFIG) or committed(folder):
        raise ConfigError(explain("to", to, "is a run's folder already", "name another one"))
    root, _, name = folder.url.rstrip("/").rpartition("/")
    found = Run(folder)
    config = run.config.override({"run.id": name, "run.root": root})
    with contextlib.ExitStack() as stack:
        for one in names[-last:]:
            stack.enter_context(note_reader(run.folder, one))
        average_checkpoints(run.folder, names[-last:], folder, configs.redact(config).model_dump(mode="json"), ema)
    found.write_config(config)
    return found
