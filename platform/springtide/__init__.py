"""springtide: elastic training of language models on preemptible GPUs. A resize does not change the training.

The map, in the order the data takes:

    config/       settings: frozen models, quantities with units, recipes
    store/        files that are committed or absent: local disk, s3, gs, az, memory; a cache on each node
    events/       events of a run, as values; names and units of its metrics
    faults/       named places of a run at which a test injects a fault; nothing happens there otherwise
      |
    corpus/       raw text -> documents -> token ids                       sources, tokenizer
    dataset/      corpus -> shards in restartable stages: parts, plan, shards
      |
    shards/       token ids -> Parquet that is read in place               rows (T, L + 1)
      |
    stream/       (seed, step) -> the same rows at any world size          batch (G,) -> rank (n, L + 1)
      |
    model/        plain nn.Module, ours or yours                           (B, L) -> logits (B, L, V)
                  what is minimised: next tokens, a teacher's answer, a function of yours   logits -> sum, weight, parts
    distributed/  ranks and their collectives; the model on a device mesh: FSDP2, compiled blocks, recomputation
      |
    checkpoint/   state that loads at any world size: staged, written in the background, verified at load
    optim/        optimizers, the learning rate as a function of tokens, averages of the weights
    interop/      models of others, in and out: Hugging Face's safetensors, config.json and tokenizer
    generation/   text from a model: sampling, batches with a cache, log-probabilities, lm-evaluation-harness
    elastic/      decisions as values: which nodes train, when to resize, notices, health, save interval   (pure)
    preemption/   the machine's notices: metadata services of clouds, a file
    tuning/       a space, a search, a population, a trial, a ranking, a sweep's folder                 (pure except folder)
      |
    training/     the step on one screen, the loop as an iterator of events; runs under torchrun; held-out loss
      |
    track/        event listeners: journal, ledger, console, MLflow      report/   charts and pages
      |
    run/          a run's folder: claim, open, verify, write its report
      |
    on_ray/       the only package that imports Ray: cluster/ data/ train/ tune/
      |
    app/          train, sweep, drill, simulate, estimate, plan: composes the packages  cli/   the same for the shell

``import springtide`` is light: torch and Ray are imported when training starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from springtide.app.plan import plan
    from springtide.app.prepare import prepare
    from springtide.app.queue import queue
    from springtide.app.resolve import ResolvedRun, resolve
    from springtide.app.sweep import sweep
    from springtide.app.train import sample, train
    from springtide.config import Config, load_config, recipes
    from springtide.errors import (
        CheckpointError,
        CommandFailed,
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
    **dict.fromkeys(("plan",), "springtide.app.plan"),
    **dict.fromkeys(("prepare",), "springtide.app.prepare"),
    **dict.fromkeys(("queue",), "springtide.app.queue"),
    **dict.fromkeys(("ResolvedRun", "resolve"), "springtide.app.resolve"),
    **dict.fromkeys(("sample", "train"), "springtide.app.train"),
    **dict.fromkeys(("sweep",), "springtide.app.sweep"),
    **dict.fromkeys(("Run", "open_run"), "springtide.run.folder"),
    **dict.fromkeys(
        (
            *("CheckpointError", "CommandFailed", "ConfigError", "CorpusError", "CorruptShard", "OrderError"),
            *("RunExists", "SpringtideError", "TrainingFailed"),
        ),
        "springtide.errors",
    ),
}

__all__ = [
    "CheckpointError",
    "CommandFailed",
    "Config",
    "ConfigError",
    "CorpusError",
    "CorruptShard",
    "OrderError",
    "ResolvedRun",
    "Run",
    "RunExists",
    "SpringtideError",
    "TrainingFailed",
    "load_config",
    "open_run",
    "plan",
    "prepare",
    "queue",
    "recipes",
    "resolve",
    "sample",
    "sweep",
    "train",
]


_PARTS = ("checkpoint", "stream")
"""Packages with parts for a training loop of your own."""


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"springtide.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'springtide' has no attribute {name!r}")
    return getattr(importlib.import_module(_DEFINED_IN[name]), name)


def __dir__() -> list[str]:
    return [*__all__, *_PARTS, "__version__"]
