"""How the cost of a step grows: with layers, width, length of the rows, and workers; against what the FLOPs say.

Our step over gloo on random ids, float32, one thread a process. One worker for the first three; the last shares out one global
batch over 1 to 4 processes, which is more than this machine may have cores. Rounds alternate through all sizes in one process;
the figure is the median over rounds. Against the size before, the step should take as many times as long as it has FLOPs.

    python benchmarks/growth.py [--quick] [--json] [--rounds 5] [--steps 6]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import claims
import torch

import springtide as st
from springtide.config import build
from springtide.distributed import process_group, world
from springtide.distributed.fsdp import parallelize
from springtide.model import flops_per_token, num_parameters, skeleton
from springtide.optim.build import optimizer_of
from springtide.training import StepSetup, Work, train_step
from springtide.training.losses import micro_batches
from springtide.training.state import initialize

VOCABULARY = 1024
BASE = {"layers": 4, "width": 256, "length": 128}
SIZES = {"layers": (2, 4, 8, 16), "width": (128, 256, 512, 1024), "length": (64, 128, 256, 512, 1024)}
WORKERS = (1, 2, 3, 4)


def config_of(name: str, layers: int, width: int, length: int, strategy: str = "zero3") -> dict[str, Any]:
    """A decoder of these sizes; heads of 64, a feed-forward of 8/3."""
    changes = {
        "run.id": name,
        "model.num_layers": layers,
        "model.dim": width,
        "model.num_heads": width // 64,
        "model.num_kv_heads": max(1, width // 128),
        "model.ffn_dim": 8 * width // 3 // 8 * 8,
        "shards.sequence_length": length,
        "model.max_sequence_length": length,
        "stream.global_batch": 8,
        "stream.lanes": 8,
        "train.micro_batch": 4,
        "parallel.strategy": strategy,
        "parallel.reduction": "fp32",
        "parallel.threads": 1,
    }
    return st.recipes.demo().override(changes).model_dump(mode="json")


class Cell:
    """A model of one size, to take steps with."""

    def __init__(self, told: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.config = config = build(told)
        self.here = world("cpu", 0, config.parallel.shards)
        model = skeleton(config.model, VOCABULARY, None)
        self.facts = {"flops_per_token": flops_per_token(model, config.shards.sequence_length)}
        self.facts |= {"parameters": num_parameters(model), "tokens": config.tokens_per_step}
        self.model = parallelize(model, config.parallel, self.here)
        initialize(self.model, config.model, VOCABULARY)
        self.optimizer = optimizer_of(self.model, config.optim)
        rows = [len(part) for part in torch.arange(config.stream.global_batch).tensor_split(self.here.size)]
        self.rows_NL = torch.randint(VOCABULARY, (rows[self.here.rank], config.shards.sequence_length + 1))
        parts = micro_batches([1] * len(self.rows_NL), 1, max(rows), config.train.rows_at_once, by_lane=False)
        self.setup = StepSetup(self.model, self.optimizer, self.here, clip_norm=1.0)
        self.work = Work(self.rows_NL, parts, config.tokens_per_step)
        self.step()

    def step(self) -> float:
        """One step [s]."""
        begin = time.perf_counter()
        train_step(self.setup, self.work)
        return time.perf_counter() - begin


def rank(told: list[dict[str, Any]]) -> None:
    """What each process of a group does; ``told`` ends with rounds and steps."""
    *configs, how = told
    with process_group("cpu"):
        cells = [Cell(config) for config in configs]
        times: list[list[float]] = [[] for _ in cells]
        for _ in range(how["rounds"]):
            for cell, taken in zip(cells, times, strict=True):
                taken.append(statistics.median(cell.step() for _ in range(how["steps"])))
        if cells[0].here.is_first:
            for cell, taken in zip(cells, times, strict=True):
                found = {"id": cell.config.run.id, **cell.facts, "step_s": statistics.median(taken), "by_round": taken}
                print(json.dumps(found), flush=True)


def main() -> None:
    """Print the tables and the claims."""
    options = claims.options(__doc__, rounds=5, steps=(6, 2))
    how = {"rounds": int(options.rounds), "steps": int(options.steps)}
    wanted = {what: sizes[: 2 if options.quick else None] for what, sizes in SIZES.items()}
    names = {f"{what}-{size}": BASE | {what: size} for what, sizes in wanted.items() for size in sizes}
    alone = claims.together(__file__, [*(config_of(name, **sizes) for name, sizes in names.items()), how], 1)
    found = []
    print("| | parameters | FLOPs a step | step, s | GFLOP/s | times the one before | FLOPs, times |")
    print("|---|---|---|---|---|---|---|")
    for what, sizes in wanted.items():
        before: dict[str, Any] | None = None
        for size in sizes:
            one = alone[f"{what}-{size}"]
            one["flops"] = one["flops_per_token"] * one["tokens"]
            row = f"| {what} {size} | {one['parameters'] / 1e6:.1f}M | {one['flops'] / 1e9:.1f}G | {one['step_s']:.4f} "
            row += f"| {one['flops'] / one['step_s'] / 1e9:.0f} |"
            if before is not None:
                row += f" {one['step_s'] / before['step_s']:.2f} | {one['flops'] / before['flops']:.2f} |"
            print(row if before is not None else f"{row} | |")
            before = one
        first, last = alone[f"{what}-{sizes[0]}"], alone[f"{what}-{sizes[-1]}"]
        ratio = (last["step_s"] / first["step_s"]) / (last["flops"] / first["flops"])
        found.append(claims.claim(f"growth_{what}_over_flops", ratio, 1.1, "lower", alone))
    print("\n| workers | zero3, step, s | times one worker's | ddp, step, s | times one worker's |")
    print("|---|---|---|---|---|")
    by_workers = {}
    for workers in WORKERS[: 2 if options.quick else None]:
        pair = [config_of(strategy, **BASE, strategy=strategy) for strategy in ("zero3", "ddp")]
        by_workers[workers] = claims.together(__file__, [*pair, how], workers)
        cells = (
            f"{one['step_s']:.4f} | {one['step_s'] / by_workers[1][name]['step_s']:.2f}"
            for name, one in by_workers[workers].items()
        )
        print(f"| {workers} | {' | '.join(cells)} |")
    claims.show(options, found)


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        rank(json.load(sys.stdin))
    else:
        main()
