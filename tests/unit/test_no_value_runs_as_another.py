"""A value that a table does not list raises with its name. The config refuses the value first for a user: the tables stop a
developer who adds a value to the config and forgets its code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from springtide.config.data import ShardsConfig
from springtide.config.engine import ModelConfig, OptimConfig, ParallelConfig
from springtide.corpus.pieces import pieces
from springtide.dataset.apart import ApartFrom
from springtide.dataset.plan import make_plan
from springtide.distributed.fsdp import parallelize, recomputed
from springtide.distributed.world import alone
from springtide.errors import ConfigError
from springtide.model import build, objective
from springtide.model.adapter import adapt
from springtide.model.decoder import Block
from springtide.model.frozen import hold
from springtide.model.positions import rotary_table
from springtide.optim.build import optimizer_of
from springtide.optim.schedule import learning_rate
from springtide.preemption.sources import open_sources
from springtide.ray.tune import schedulers
from springtide.storage import Folder
from springtide.tune import search

MODEL = ModelConfig(num_layers=1, dim=32, num_heads=2, num_kv_heads=1)


def _with(section: Any, **changes: Any) -> Any:
    """The section with values that its validation would refuse."""
    return section.model_copy(update=changes)


def _optimizer(**changes: Any) -> object:
    return optimizer_of(build(MODEL, 100), _with(OptimConfig(), **changes))


def _model(**changes: Any) -> object:
    return Block(_with(MODEL, **changes))


def _laid_out(**changes: Any) -> object:
    return parallelize(build(MODEL, 8), _with(ParallelConfig(), **changes), alone(torch.device("cpu")))


def _plan(folder: Folder, **changes: Any) -> object:
    return make_plan(folder, [], _with(ShardsConfig(), **changes), False, ApartFrom((), (), ()))


def _objective(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(objective, "OBJECTIVES", (*objective.OBJECTIVES, "another"))
    return objective.Objective("another", 8, torch.device("cpu"), eos_id=0)


def _search(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(search, "SEARCHES", (*search.SEARCHES, "another"))
    return search.search_of("another", None, None, 0, [])  # type: ignore[arg-type]


def _scheduler(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(schedulers, "SCHEDULERS", (*schedulers.SCHEDULERS, "another"))
    budget = type("Budget", (), {"rungs": 2, "reduction": 2})
    return schedulers.scheduler_of("another", type("Sweep", (), {"metric": "loss", "mode": "min", "budget": budget}))  # type: ignore[arg-type]


CASES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "optim.optimizer": lambda _: _optimizer(optimizer="another"),
    "optim.moments": lambda _: _optimizer(moments="another"),
    "optim.schedule": lambda _: learning_rate(_with(OptimConfig(), schedule="another"), 10**6, 10**7),
    "objective.source": _objective,
    "model.activation": lambda _: _model(activation="another"),
    "model.norms": lambda _: _model(norms="another"),
    "model.adapter": lambda _: adapt(nn.ModuleList(), _with(MODEL, adapter="another")),
    "model.base_precision": lambda _: hold(nn.Linear(2, 2), "another"),
    "model.rope_scaling": lambda _: rotary_table(_with(MODEL, rope_scaling="another"), 4),
    "parallel.strategy": lambda _: _laid_out(strategy="another"),
    "parallel.offload": lambda _: _laid_out(offload="another"),
    "parallel.recompute": lambda _: recomputed(nn.Identity(), "another"),
    "shards.packing": lambda _: _plan(Folder("memory://none"), packing="another"),
    "corpus.deduplicate": lambda _: list(pieces(["one"], "another")),
    "elastic.notices": lambda _: open_sources("another", "", "", False, "node", print),
    "--search": _search,
    "--scheduler": _scheduler,
}


@pytest.mark.parametrize("field", CASES)
def test_an_unlisted_value_raises_with_its_name(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"^{field} = 'another': .*(table|computed)"):
        CASES[field](monkeypatch)
