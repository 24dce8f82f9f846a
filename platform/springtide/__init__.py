"""springtide: elastic training of language models on preemptible GPUs. A resize changes nothing in the training.

The map, drawn in the order the data takes:

    config/       the words all else is written in: frozen models, amounts with units, recipes
      |
    store/        bytes at a path, committed or absent: local disk, s3, gs, az, memory; a cache on each node
      |
    corpus/       raw text -> documents -> token ids                       sources, vocabulary
    dataset/      both joined in stages that may be killed: parts, plan, shards
      |
    shards/       token ids -> sealed Parquet that is read in place        rows (T, L + 1)
      |
    stream/       (seed, step) -> the same rows at any world size          batch (G,) -> rank (n, L + 1)
      |
    model/        plain nn.Module, ours or yours                           (B, L) -> logits (B, L, V)
    parallel/     the model laid over a mesh: FSDP2, gradients summed; the links between ranks, to cut them
    elastic/      decisions as values: who trains, when to change that, notices, fitness, micro-steps of uneven workers, cadence
      |
    train/        the step on one screen, the loop as an iterator of events; runs under torchrun; held-out loss
      |
    checkpoint/   a step you can come back to at another world size: staged, written beside training, verified as it loads
    track/        what a run says about itself: events, journal, ledger, console, MLflow, report
      |
    sweep/        a space, a search, a population, a trial, a verdict; which field mattered, a page
      |
    on_ray/       the only room that imports Ray: cluster, nodes, notices, group, policy, hang, worker, feed, control, vault,
                  inside, beside, pool, workers, trial, tuner
      |
    runs.py       a run's folder, claimed or opened      verify.py   the proof of what it trained on
    sweeps.py     many trials of one recipe, and which is best
    drill.py      real losses on this machine, compared with a run left in peace
    plan.py       what a run would make of a record of spot capacity      show.py     what lies in a folder
    fit.py        what a device must hold for a step, and what would make it less
    api.py        st.train, st.prepare, st.attach        cli.py, cli_elastic.py      the same for the shell

``import springtide`` is light: torch and Ray load when something trains.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from springtide.api import attach, prepare, sample, train
    from springtide.config import Config, load, override, recipes
    from springtide.runs import Run
    from springtide.sweeps import sweep

__version__ = "0.1.0"

_WHERE = {
    "Config": "springtide.config",
    "Run": "springtide.runs",
    "attach": "springtide.api",
    "load": "springtide.config",
    "override": "springtide.config",
    "prepare": "springtide.api",
    "recipes": "springtide.config",
    "sample": "springtide.api",
}

__all__ = ["Config", "Run", "attach", "load", "override", "prepare", "recipes", "sample", "sweep", "train"]


class _Package(types.ModuleType):
    """This module. ``train`` and ``sweep`` are both functions, for people, and rooms, as in ``torchrun -m springtide.train``;
    importing the room would otherwise put it in the function's place."""

    @property
    def train(self) -> Any:
        return importlib.import_module("springtide.api").train

    @train.setter
    def train(self, room: types.ModuleType) -> None:
        pass

    @property
    def sweep(self) -> Any:
        return importlib.import_module("springtide.sweeps").sweep

    @sweep.setter
    def sweep(self, room: types.ModuleType) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module 'springtide' has no attribute {name!r}")
        return getattr(importlib.import_module(_WHERE[name]), name)


sys.modules[__name__].__class__ = _Package
