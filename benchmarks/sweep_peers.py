"""The peer of ``sweep.py``: bare Ray Tune, each trial a bare Ray Train of a fixed number of workers, as Ray's guide to the two
together has it. Of springtide it takes the model and what ``sweep.py`` wrote down for everybody: rows, first weights, points.

Its data are rows.npy (steps * batch, L + 1), heldout.npy (n, L + 1) and first.pt; as trials train its folder gets
    asked/trial-0000.json     when Tune asked for its point
    steps/trial-0000.jsonl    each step and each evaluation, as it was made
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray import tune
from ray.train.torch import TorchConfig, TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher
from torch import Tensor, nn

from springtide.config.engine import ModelConfig
from springtide.model import build

ROWS_AT_ONCE = 16
DRIVERS = {"CPU": 0, "node:__internal_head__": 0.001}
"""Trials are driven from the head, which stays, as Ray's guide advises for spot."""


class Loop:
    """A trial's training: one rank of it."""

    def __init__(
        self, told: dict[str, Any], rank: int = 0, size: int = 1, wrap: Callable[..., Any] = lambda model: model
    ) -> None:
        torch.set_num_threads(1)
        self._told, self._rank, self._size = told, rank, size
        folder = Path(told["data"])
        self._rows = np.load(folder / "rows.npy", mmap_mode="r")
        self._heldout = np.load(folder / "heldout.npy")[rank::size]
        self._model = build(ModelConfig(**told["model"]), told["vocabulary"])
        self._model.load_state_dict(torch.load(folder / "first.pt"))
        self._net = wrap(self._model)
        decay = told["point"].get("optim.weight_decay", told["weight_decay"])
        groups = [
            {"params": [one for one in self._net.parameters() if one.dim() >= 2], "weight_decay": decay},
            {"params": [one for one in self._net.parameters() if one.dim() < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=told["betas"], eps=told["eps"], fused=True)
        self.step = 0

    def train(self) -> None:
        """One step."""
        batch = self._told["batch"]
        rows = self._rows[self.step * batch : (self.step + 1) * batch][self._rank :: self._size]
        rate = self._told["point"].get("optim.peak_lr", self._told["peak_lr"]) * self._told["shape"][self.step]
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        _loss(self._net, rows).backward()
        nn.utils.clip_grad_norm_(self._net.parameters(), self._told["clip_norm"])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """On the held-out rows, nats per token."""
        self._model.eval()
        parts = range(0, len(self._heldout), ROWS_AT_ONCE)
        nats = sum(float(_loss(self._model, self._heldout[one : one + ROWS_AT_ONCE], "sum")) for one in parts)
        total = torch.tensor([nats, self._heldout[:, 1:].size], dtype=torch.float64)
        if self._size > 1:
            dist.all_reduce(total)
        self._model.train()
        return float(total[0] / total[1])

    def state(self) -> dict[str, Any]:
        """All of it."""
        return {"step": self.step, "model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a ``state``."""
        self.step = state["step"]
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])


def _loss(model: nn.Module, rows: np.ndarray, reduction: str = "mean") -> Tensor:
    rows_BL = torch.from_numpy(rows.astype(np.int64))
    return F.cross_entropy(model(rows_BL[:, :-1]).flatten(0, 1), rows_BL[:, 1:].flatten(), reduction=reduction)


def work(told: dict[str, Any]) -> None:
    """What runs in each Ray Train worker: at each rung it evaluates, saves and reports."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    loop = Loop(told, rank, size, ray.train.torch.prepare_model)
    if found := ray.train.get_checkpoint():
        with found.as_directory() as folder:
            loop.load(torch.load(Path(folder) / "state.pt"))
    with Path(told["log"]).open("a", buffering=1) as log:  # a line at a time: what is killed has said what it did
        while loop.step < told["steps"]:
            loop.train()
            line: dict[str, Any] = {"step": loop.step, "time_s": time.time(), "workers": size}
            if at_rung := loop.step % told["every"] == 0:
                line |= {"heldout_loss": loop.heldout_loss(), "evaluated_s": time.time()}
            if rank == 0:
                log.write(json.dumps(line) + "\n")
            if at_rung:
                _report({"heldout_loss": line["heldout_loss"], "step": loop.step}, loop, rank)


def _report(metrics: dict[str, Any], loop: Loop, rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            torch.save(loop.state(), Path(folder) / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def drive(config: dict[str, Any]) -> None:
    """A trial of Tune's: it starts Ray Train and waits. Its name is the same when it is started again: Ray Train resumes."""
    told = config["told"]
    name = f"trial-{config['number']:04d}"
    log = f"{told['folder']}/steps/{name}.jsonl"
    trainer = TorchTrainer(
        work,
        train_loop_config={**told, "point": config["point"], "log": log},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=told["size"], resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            name=f"train-{name}",
            storage_path=f"{told['folder']}/train",
            failure_config=ray.train.FailureConfig(max_failures=-1),
            callbacks=[TuneReportCallback()],
        ),
    )
    trainer.fit()


class Listed(Searcher):
    """Points in the order of a list, each noted when it is asked for."""

    def __init__(self, told: dict[str, Any], points: list[dict[str, Any]]) -> None:
        super().__init__(metric="heldout_loss", mode="min")
        self._told, self._points, self._asked = told, points, 0

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """The next."""
        if self._asked == len(self._points):
            return Searcher.FINISHED
        number, self._asked = self._asked, self._asked + 1
        Path(self._told["folder"], "asked", f"trial-{number:04d}.json").write_text("{}")
        return {"number": number, "point": self._points[number], "told": self._told}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing: points are known beforehand."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing."""


def sweep(told: dict[str, Any], points: list[dict[str, Any]], slots: int, rungs: int, reduction: int) -> None:
    """Try all ``points``, as many at once as ``slots`` hold; with ``reduction`` one in so many goes on at a rung of ASHA."""
    for name in ("asked", "steps"):
        Path(told["folder"], name).mkdir(parents=True, exist_ok=True)
    asked = {"metric": "heldout_loss", "mode": "min"}
    judges = ASHAScheduler(max_t=rungs, grace_period=1, reduction_factor=reduction, **asked) if reduction else None
    tuner = tune.Tuner(
        tune.with_resources(drive, tune.PlacementGroupFactory([DRIVERS])),
        tune_config=tune.TuneConfig(
            search_alg=Listed(told, points),
            num_samples=len(points),
            scheduler=judges,
            max_concurrent_trials=max(1, slots // told["size"]),
            reuse_actors=False,  # a function that Tune stops cannot be reset: the trial to come would be given up
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=f"{told['folder']}/tune",
            failure_config=tune.FailureConfig(max_failures=-1),
            verbose=0,
        ),
    )
    tuner.fit()
