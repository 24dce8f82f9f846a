"""springtide: elastic training of language models on preemptible GPUs. A resize changes nothing in the training.

The map, in the order the data takes:

    config/       settings: frozen models, quantities with units, recipes
    store/        bytes at a path, committed or absent: local disk, s3, gs, az, memory; a cache on each node
    events/       what happens in a run, as values; names and units of its metrics
      |
    dist/         ranks that talk: the world, collectives, connections to cut
      |
    corpus/       raw text -> documents -> token ids                       sources, tokenizer
    dataset/      both joined in stages that may be killed: parts, plan, shards
      |
    shards/       token ids -> sealed Parquet that is read in place        rows (T, L + 1)
      |
    stream/       (seed, step) -> the same rows at any world size          batch (G,) -> rank (n, L + 1)
      |
    model/        plain nn.Module, ours or yours                           (B, L) -> logits (B, L, V)
    parallel/     the model laid over a mesh: FSDP2, compiled blocks, recomputation
      |
    checkpoint/   a step that a run can return to at another world size: staged, written in the background, verified at load
    elastic/      decisions as values: who trains, when that changes, notices, health, save interval   (pure)
    tuning/       a space, a search, a population, a trial, a ranking                                  (pure but for population)
      |
    training/     the step on one screen, the loop as an iterator of events; runs under torchrun; held-out loss
      |
    track/        who listens: journal, ledger, console, MLflow      report/   charts and pages
      |
    run/          a run's folder: claimed, opened, verified
      |
    on_ray/       the only package that imports Ray: cluster/ data/ train/ tune/
      |
    app/          train, sweep, drill, simulate, estimate: the only composition        cli/   the same for the shell

``import springtide`` is light: torch and Ray load when something trains.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from springtide.app.sweep import sweep
    from springtide.app.train import prepare, sample, train
    from springtide.config import Config, load_config, recipes
    from springtide.errors import (
        CheckpointError,
        ConfigError,
        CorpusError,
        CorruptShard,
        OrderError,
        RunExists,
        SpringtideError,
        TrainingFailed,
    )
    from springtide.run.folder import Run, open_run

__version__ = "0.1.0"

_DEFINED_IN = {
    **dict.fromkeys(("Config", "load_config", "recipes"), "springtide.config"),
    **dict.fromkeys(("prepare", "sample", "train"), "springtide.app.train"),
    **dict.fromkeys(("sweep",), "springtide.app.sweep"),
    **dict.fromkeys(("Run", "open_run"), "springtide.run.folder"),
    **dict.fromkeys(
        (
            *("CheckpointError", "ConfigError", "CorpusError", "CorruptShard", "OrderError", "RunExists"),
            *("SpringtideError", "TrainingFailed"),
        ),
        "springtide.errors",
    ),
}

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "CorpusError",
    "CorruptShard",
    "OrderError",
    "Run",
    "RunExists",
    "SpringtideError",
    "TrainingFailed",
    "load_config",
    "open_run",
    "prepare",
    "recipes",
    "sample",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'springtide' has no attribute {name!r}")
    return getattr(importlib.import_module(_DEFINED_IN[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
