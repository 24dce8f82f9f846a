"""springtide: elastic training of language models on preemptible GPUs. A resize does not change the training.

The packages, in the order in which data flows through them:

    config/       settings: frozen models, quantities with units, recipes
    storage/      files, each written whole or not at all: local disk, s3, gs, az, memory; a cache on each node
    events/       events of a run, such as a step or a save, as frozen values; names and units of metrics
      |
    corpus/       text and chats -> token ids                              sources, tokenizer, templates
    dataset/      corpus -> shards in restartable stages: tokenized parts, plan, shards
    shards/       token ids in Parquet that is read in place               rows (T, L + 1)
    stream/       (seed, step) -> the same rows at any world size          batch (G,) -> rank (n, L + 1)
      |
    model/        plain nn.Module, ours or yours                           (B, L) -> logits (B, L, V)
                  objectives: next tokens, distillation, pairs, yours         logits -> sum, weight, parts
    distributed/  ranks and their collectives; a model sharded over them: FSDP2, compiled blocks, recomputation
    checkpoint/   state that loads at any world size: staged, written in the background, verified at load
    optim/        optimizers, schedules of the learning rate, averages of the weights
    hf/           import and export of Hugging Face models: safetensors, config.json, tokenizer
    eval/         text from a model: sampling, batches with a cache, log-probabilities, lm-evaluation-harness
      |
    elastic/      decisions, without I/O: which nodes train, when to resize, preemption, health, save interval (pure)
    preemption/   notices that this machine will be preempted: metadata services of clouds, a file
    tune/         hyperparameter sweeps: search spaces, searches, trials, rankings, a folder    (pure except for the folder)
      |
    training/     the training step, the loop as an iterator of events, plug-in parts of the loop; runs under torchrun
    tracking/     listeners of events: journal (log of all events), ledger (costs), console, MLflow, Prometheus
    run/          a run's folder: open, verify, status; its HTML report in report/
      |
    ray/          the only package that imports Ray: cluster/ data/ train/ tune/
    planning/     memory, time, cost and spot markets before a run is paid for
    api/          Python calls for users: train, prepare, sweep, drill     cli/   the same as shell commands

Shapes: T rows of a dataset, L + 1 ids in a row, G rows in a batch, n rows on a rank, B rows of a micro-batch, V ids in all.

All packages use ``errors``. ``faults`` has the points at which tests inject faults. ``renamed`` resolves old module names.
``import springtide`` is fast: torch and Ray are imported when training starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from springtide import renamed

if TYPE_CHECKING:
    from springtide.api.prepare import prepare
    from springtide.api.queue import queue
    from springtide.api.resolve import ResolvedRun, resolve
    from springtide.api.sweep import sweep
    from springtide.api.train import sample, train
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
    from springtide.planning.plan import plan
    from springtide.run.folder import Run, open_run

__version__ = "0.1.0"

renamed.install()

_DEFINED_IN = {
    **dict.fromkeys(("Config", "load_config", "recipes"), "springtide.config"),
    **dict.fromkeys(("plan",), "springtide.planning.plan"),
    **dict.fromkeys(("prepare",), "springtide.api.prepare"),
    **dict.fromkeys(("queue",), "springtide.api.queue"),
    **dict.fromkeys(("ResolvedRun", "resolve"), "springtide.api.resolve"),
    **dict.fromkeys(("sample", "train"), "springtide.api.train"),
    **dict.fromkeys(("sweep",), "springtide.api.sweep"),
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
"""Packages with building blocks for a user's own training loop."""


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"springtide.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'springtide' has no attribute {name!r}")
    return getattr(importlib.import_module(_DEFINED_IN[name]), name)


def __dir__() -> list[str]:
    return [*__all__, *_PARTS, "__version__"]
