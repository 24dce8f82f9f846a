"""Every layout of the model: what it learns in 30 steps against float32 on one worker, and what a worker holds for it.

Two real processes over gloo, one after the other through strategy x precision x recompute, on the same rows. Predicted bytes
are those of ``springtide plan``; measured is the most that the C library had given out at once in the median of a few
steps. To ask it after each operation is what most of this benchmark's half an hour goes into. It shows that layouts agree, and
that bytes are foretold; a GPU would have other figures.

    python benchmarks/layouts.py [--quick] [--json] [--steps 30]
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import claims
import torch

import springtide as st
from springtide.config import Config, build
from springtide.distributed import process_group, world
from springtide.events import StepDone
from springtide.planning.step_memory import Meter, predicted_bytes
from springtide.storage import Folder
from springtide.stream import Batch, RankReader, load, open_data
from springtide.training import TrainLoop

STRATEGIES, PRECISIONS, RECOMPUTES = (
    ("ddp", "zero1", "zero2", "zero3"),
    ("fp32", "bf16", "fp16"),
    ("none", "selective", "full"),
)
TOLERANCES = {"fp32": 5e-5, "bf16": 0.05, "fp16": 0.01}
"""Of the loss after the last step [nats]."""
WORKERS = 2
METERED = 4
"""Steps."""
SMALL = {"corpus.max_files": 40, "model.num_layers": 1, "model.dim": 64, "model.ffn_dim": 256, "train.micro_batch": 4}
"""For --quick."""


def config_of(folder: str, steps: int, small: bool) -> Config:
    """Wide enough that a block's weights and activations both count."""
    changes = {
        "run.root": f"{folder}/runs",
        "shards.root": f"{folder}/datasets",
        "model.num_layers": 6,
        "model.dim": 192,
        "model.ffn_dim": 768,
        "stream.global_batch": 8,
        "stream.max_epochs": 1e6,  # nobody uses the model
        "train.micro_batch": 2,
        "train.total": steps * 8 * st.recipes.demo().shards.sequence_length,
        "train.eval_tokens": 0,
        "optim.warmup": 0,
        "optim.peak_lr": 1e-3,
        "checkpoint.every_steps": 0,
        "parallel.reduction": "fp32",
        "parallel.threads": 1,
        "elastic.max_workers": WORKERS,
    }
    return st.prepare(st.recipes.demo().override({**changes, **(SMALL if small else {})}))


def rank(configs: list[dict[str, Any]], workers: int) -> None:
    """What each process of a group does: all cells in turn; rank 0 prints a line for each."""
    with process_group("cpu"):
        for told in [*_warm_ups(configs[0], workers), *configs]:
            config = build(told)
            with contextlib.ExitStack() as stack:
                meter = stack.enter_context(Meter(torch.device("cpu")))
                here = world("cpu", 0, config.parallel.shards)
                run = TrainLoop(config, here, open_data(config.data), Folder(config.run.root) / config.run.id)
                found = {"id": config.run.id, **_train(run, meter, stack)}
                del run
            if here.is_first:
                print(json.dumps(found), flush=True)


def _warm_ups(first: dict[str, Any], workers: int) -> list[dict[str, Any]]:
    """Two steps in each type: what libraries take for themselves, the first time they multiply it, is no layout's."""
    tokens = 2 * first["stream"]["global_batch"] * first["shards"]["sequence_length"]
    return [
        {
            **first,
            "run": {**first["run"], "id": f"warm-up-{precision}-{workers}"},
            "parallel": {**first["parallel"], "precision": precision},
            "train": {**first["train"], "total": tokens},
        }
        for precision in PRECISIONS
    ]


def _train(run: TrainLoop, meter: Meter, metering: contextlib.ExitStack) -> dict[str, float]:
    def feed(reader: RankReader, step: int) -> Iterator[Batch]:
        return load(reader, reader.plan(step, run.config.num_steps, 2**16))

    losses, most = [], []
    for event in run.events(feed, lambda: None):
        if isinstance(event, StepDone):
            losses.append(event.loss)
            if len(most) < METERED:
                most.append(meter.lap())
            if len(most) == METERED:
                metering.close()  # to ask the allocator after each operation takes longer than the operation
    return {"loss": losses[-1], "bytes": statistics.median(most[1:])}


def main() -> None:
    """Print the table and the claims."""
    options = claims.options(__doc__, rounds=1, steps=(30, METERED))
    cells = list(itertools.product(STRATEGIES, PRECISIONS, RECOMPUTES))[:: 35 if options.quick else 1]  # first and last
    with tempfile.TemporaryDirectory() as folder:
        base = config_of(folder, int(options.steps), options.quick)
        configs = {
            cell: base.override({"run.id": "-".join(cell), **dict(zip(_FIELDS, cell, strict=True))}) for cell in cells
        }
        alone = claims.together(__file__, [base.override({"run.id": "alone"}).model_dump(mode="json")], 1)["alone"][
            "loss"
        ]
        found = claims.together(__file__, [config.model_dump(mode="json") for config in configs.values()], WORKERS)
        data = open_data(base.data)
        predicted = {
            cell: predicted_bytes(config, data.vocab_size, data.eos_id, WORKERS) for cell, config in configs.items()
        }
    print(f"float32 on one worker: loss {alone:.5f} after {options.steps:.0f} steps\n")
    print("| strategy | precision | recompute | loss - that | tolerance | predicted | measured | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    apart, ratios = [], []
    for cell in cells:
        one = found["-".join(cell)]
        apart.append(abs(one["loss"] - alone) / TOLERANCES[cell[1]])
        ratios.append(predicted[cell] / one["bytes"])
        print(
            f"| {' | '.join(cell)} | {one['loss'] - alone:+.6f} | {TOLERANCES[cell[1]]:g} | {predicted[cell] / 2**20:.1f} MiB "
            f"| {one['bytes'] / 2**20:.1f} MiB | {ratios[-1]:.3f} |"
        )
    off = max(abs(ratio - 1.0) for ratio in ratios)
    claims.show(
        options,
        [
            claims.claim(
                "layouts_loss_over_tolerance",
                max(apart),
                1.0,
                "lower",
                dict(zip(map("-".join, cells), apart, strict=True)),
            ),
            claims.claim(
                "bytes_predicted_off", off, 0.1, "lower", dict(zip(map("-".join, cells), ratios, strict=True))
            ),
        ],
    )


_FIELDS = ("parallel.strategy", "parallel.precision", "parallel.recompute")

if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        rank(json.load(sys.stdin), int(os.environ["WORLD_SIZE"]))
    else:
        main()
